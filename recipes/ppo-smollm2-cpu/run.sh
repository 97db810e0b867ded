#!/bin/sh
# verl-fuse on; arguments are Hydra overrides.
# `verl-fuse run ppo-smollm2-cpu --dry-run` prints the plain verl command behind it.
exec verl-fuse run ppo-smollm2-cpu "$@"
