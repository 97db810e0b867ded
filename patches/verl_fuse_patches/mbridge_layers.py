"""mbridge builds Megatron's own layers where Transformer Engine, which needs an accelerator, is not there."""

import functools
from types import ModuleType
from typing import Any

from verl_fuse_patches.registry import Patch


def apply(module: ModuleType) -> None:
    spec = module.get_gpt_decoder_block_spec

    @functools.wraps(spec)
    def local(config: Any, use_transformer_engine: bool, **kwargs: Any) -> Any:
        return spec(config, use_transformer_engine=False, **kwargs)

    module.get_gpt_decoder_block_spec = local  # type: ignore[attr-defined]


PATCH = Patch(
    name="mbridge_layers",
    reason="layers are always Transformer Engine's",
    upstream="https://github.com/ISEEKYAN/mbridge/blob/main/mbridge/core/llm_bridge.py",
    distributions=("mbridge",),
    target="mbridge.core.llm_bridge:LLMBridge._get_transformer_layer_spec",
    fingerprints={"==0.15.1": "fbb8ad51d0bf3035"},
    remove_when="mbridge takes Megatron's own layers where Transformer Engine is missing",
    apply=apply,
)
