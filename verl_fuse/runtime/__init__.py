"""Runs solved schedules on torch.distributed: lowering, check, executor, faults. Imports torch;
neither verl nor megatron."""
