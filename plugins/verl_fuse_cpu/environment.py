"""Lists the environment variables of a run on the cpu platform, each with its reason."""

import os
from collections.abc import Mapping

# Every process needs these, whatever started the process; they are set as defaults when the platform is registered.
_PROCESS = {
    # verl registers its engines for the devices cuda and npu only; the cuda ones are device-agnostic
    # (verl/workers/engine/base.py).
    "VERL_ENGINE_DEVICE": "cuda",
    # vLLM otherwise binds the threads of every replica to the same cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # This keeps `distributed_executor_backend=uni`, one process per replica instead of two (vllm/platforms/cpu.py).
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}

# The interpreter or a library reads these while starting, so they must be there before the first process is.
_LAUNCH = {
    "VERL_PLATFORM": "cpu",
    # Ranks, replicas and data workers share the cores; a second thread gains a replica less than a fifth.
    "OMP_NUM_THREADS": "1",
    # TransferQueue raises torch's thread count to this number for each batch that TransferQueue moves.
    "TQ_NUM_THREADS": "1",
    # Compiling takes longer here than the time that compiled code could save.
    "TORCHDYNAMO_DISABLE": "1",
    # Nothing is reported to anybody unless the user asks for it.
    "VLLM_NO_USAGE_STATS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def active() -> bool:
    """Tell whether this process runs on the cpu platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def process_defaults() -> Mapping[str, str]:
    """Return the environment variables that each process of the run needs; a value that is already set wins."""
    return dict(_PROCESS)


def environment() -> dict[str, str]:
    """Return the environment variables for the process that launches a run; all others inherit them."""
    return {**_PROCESS, **_LAUNCH}
