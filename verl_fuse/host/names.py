"""Names under which verl finds verl-fuse."""

TRAINER_MODE = "fuse"
