"""Holds Hydra groups: `platform: cpu` (the settings that a run without an accelerator needs) and `task: euclid`,
`euclid-tools` or `smollm2` (the tasks of verl_fuse_cpu.task)."""
