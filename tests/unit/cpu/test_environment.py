"""Variables of a run on the cpu platform."""

from verl_fuse_cpu.environment import environment, process_defaults


def test_a_launching_process_gets_all_variables():
    assert environment() == {
        "VERL_PLATFORM": "cpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        "TQ_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def test_what_every_process_needs_is_part_of_it():
    assert process_defaults().items() <= environment().items()
