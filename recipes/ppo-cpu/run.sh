#!/bin/sh
# verl-fuse on; arguments are Hydra overrides.
# `verl-fuse run ppo-cpu --dry-run` prints the plain verl command behind it.
exec verl-fuse run ppo-cpu "$@"
