"""The critic's attention implementation is the configured one, not always flash_attention_2.

verl loads the critic with a constant `attn_implementation="flash_attention_2"`, whatever `critic.model.override_config`
says, and reports the failed import as "please install trl". The configured implementation is already in `model_config`;
the loader runs with its constant replaced by that implementation, so verl's two ways of loading a value head stay
verl's own.
"""

from types import FunctionType
from typing import Any

from verl_fuse_patches.constants import with_constant
from verl_fuse_patches.registry import Patch, around


def load_valuehead_model(
    original: FunctionType, local_path: str, torch_dtype: Any, model_config: Any, trust_remote_code: bool
) -> Any:
    load = with_constant(original, "flash_attention_2", model_config._attn_implementation)
    return load(local_path, torch_dtype, model_config, trust_remote_code)


PATCH = Patch(
    name="critic_attention",
    reason="the critic is loaded with flash_attention_2 whatever critic.model.override_config.attn_implementation says",
    upstream="https://github.com/verl-project/verl/issues/5210",
    target="verl.utils.model:load_valuehead_model",
    fingerprints={">=0.9.1,<0.10": "366d2c00867fbb42"},
    remove_when="verl passes the configured attention implementation to load_valuehead_model",
    apply=around({"load_valuehead_model": load_valuehead_model}),
)
