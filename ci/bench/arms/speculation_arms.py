"""With this external module of the bench's runs (VERL_USE_EXTERNAL_MODULES) every rollout engine counts its forward
passes, with drafts or without.

Each engine appends the time at which a pass began, and the number of requests in the pass, to a file of its own.
"""

import functools
import os
import struct
import time
from pathlib import Path
from typing import Any

from verl_fuse.host.upstream.on_import import on_import

PASS = struct.Struct("<dq")


def _count_passes(module: Any) -> None:
    execute = module.GPUModelRunner.execute_model
    path = Path(os.environ["SPECULATION_BENCH"]) / f"{os.getpid()}.counted"

    @functools.wraps(execute)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.total_num_scheduled_tokens:
            with path.open("ab") as file:
                file.write(PASS.pack(time.time(), len(scheduler_output.num_scheduled_tokens)))
        return execute(self, scheduler_output, *args, **kwargs)

    module.GPUModelRunner.execute_model = execute_model


on_import("vllm.v1.worker.gpu_model_runner", _count_passes)
