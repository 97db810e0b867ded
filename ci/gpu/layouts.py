"""List the layouts between which weights move, by number of ranks: training to training, and training to vLLM like a
weight sync."""

LAYOUTS: dict[int, tuple[tuple[str, str], ...]] = {
    1: (("fsdp 1", "vllm tp1"),),
    2: (("fsdp 2", "vllm tp2"), ("fsdp 2", "vllm tp1 dp2"), ("megatron tp2", "fsdp 2"), ("fsdp 2", "megatron pp2")),
    8: (
        ("fsdp 8", "vllm tp2 dp4"),
        ("fsdp 2x4", "vllm tp4 dp2"),
        ("megatron tp2 pp2 dp2", "vllm tp2 dp4"),
        ("megatron tp2 pp2 dp2", "fsdp 8"),
        ("fsdp 8", "fsdp 2x4"),
    ),
}
