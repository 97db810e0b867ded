"""Names by which verl finds verl-fuse, and readers of a log tell its lines."""

TRAINER_MODE = "fuse"
LOG_PREFIX = "verl-fuse: "
