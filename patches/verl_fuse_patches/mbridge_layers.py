"""mbridge builds Megatron's own layers where Transformer Engine, which needs an accelerator, is not there."""

from collections.abc import Callable
from typing import Any

from verl_fuse_patches.registry import Patch, around


def local(original: Callable[..., Any], config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
    return original(config, use_transformer_engine=False, **kwargs)


PATCH = Patch(
    name="mbridge_layers",
    reason="layers are always Transformer Engine's",
    upstream="https://github.com/ISEEKYAN/mbridge/blob/main/mbridge/core/llm_bridge.py",
    target="mbridge.core.llm_bridge:LLMBridge._get_transformer_layer_spec",
    fingerprints={"==0.15.1": "fbb8ad51d0bf3035"},
    remove_when="mbridge takes Megatron's own layers where Transformer Engine is missing",
    apply=around({"get_gpt_decoder_block_spec": local}),
)
