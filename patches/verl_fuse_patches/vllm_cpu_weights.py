"""vLLM on a CPU keeps loadable weights beside the packed ones.

After loading, vLLM packs each linear layer's weight for oneDNN and replaces the parameter by an empty one that has no
weight loader, so the next weight sync fails. With the request to keep the weight vLLM still packs; verl runs the
packing again after every sync. The price is one more copy of the weights in memory. The callers look the function up at
each call, so an import of verl in a process (by its worker extension, before the model is built) is enough for the
patch to act there.
"""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def dispatch_cpu_unquantized_gemm(original: Callable[..., None], layer: Any, remove_weight: bool) -> None:
    original(layer, remove_weight=False)


PATCH = Patch(
    name="vllm_cpu_weights",
    reason="packing a linear layer's weight drops its parameter and weight loader, so weights can be loaded only once",
    upstream="https://github.com/verl-project/verl/pull/7987",
    target="vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm",
    fingerprints={
        ">=0.24,<0.26": "4273ea919fa23497",
        ">=0.26,<0.27": "14d8796cb895e345",
        ">=0.27,<0.28": "1de53e3caf93a064",
        ">=0.28,<0.29": "cf59ac992f157b9e",
        ">=0.29,<0.31": "e12c8522954e7ddf",
        ">=0.31,<0.32": "6f3b6353978b39a7",
    },
    remove_when="verl syncs weights through vLLM's layerwise reload, which restores "
    "layers before it loads them (the linked "
    "pull request)",
    apply=around({"dispatch_cpu_unquantized_gemm": dispatch_cpu_unquantized_gemm}),
    watched=(
        (
            "verl.workers.rollout.vllm_rollout.utils:vLLMColocateWorkerExtension.update_weights_from_ipc",
            "cb1b05a91c772c6b",
        ),
    ),
)
