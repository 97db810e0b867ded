"""Names by which verl finds verl-fuse, and by which readers of a log tell its lines."""

TRAINER_MODE = "fuse"
LOG_PREFIX = "verl-fuse: "
