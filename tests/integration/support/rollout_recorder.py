"""External module for verl runs (VERL_USE_EXTERNAL_MODULES): what step_recorder saves, and after every weight sync the
weights of each vLLM worker.

The worker's n-th sync (from 0) is saved as rollout_REPLICA_n.pt, with _rankR where there are several workers,
parameters under vLLM's names.
"""

import functools
import os

import step_recorder

from verl_fuse.host.upstream.on_import import on_import


def _record_syncs(module):
    cls = module.vLLMColocateWorkerExtension
    stock = cls.update_weights_from_ipc
    count = {}

    @functools.wraps(stock)
    def update_weights_from_ipc(self, *args, **kwargs):
        result = stock(self, *args, **kwargs)
        number = count[id(self)] = count.get(id(self), -1) + 1
        weights = {name: parameter.detach().clone() for name, parameter in self.model_runner.model.named_parameters()}
        worker = f"_rank{self.rank}" if self.parallel_config.tensor_parallel_size > 1 else ""
        step_recorder._save(f"rollout_{os.environ['VERL_REPLICA_RANK']}_{number}{worker}.pt", weights)
        return result

    cls.update_weights_from_ipc = update_weights_from_ipc


on_import("verl.workers.rollout.vllm_rollout.utils", _record_syncs)
