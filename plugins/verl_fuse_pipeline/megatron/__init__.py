"""Makes several Megatron engines of one process independent of each other."""
