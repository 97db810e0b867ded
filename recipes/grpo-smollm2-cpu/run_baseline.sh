#!/bin/sh
# Stock verl (trainer.v1.trainer_mode=sync, no `fuse` block), everything else the same; arguments are Hydra overrides.
exec verl-fuse run grpo-smollm2-cpu --baseline "$@"
