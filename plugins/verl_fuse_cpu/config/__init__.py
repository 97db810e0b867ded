"""Holds Hydra groups: `platform: cpu` (the settings that a run without an accelerator needs) and `task: euclid` or
`euclid-tools` (the task of verl_fuse_cpu.task)."""
