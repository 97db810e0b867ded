"""Parameters for a KV connector of the engines with each request: the hook `fuse_transfer`, asked where requests are
made.

vLLM hands `kv_transfer_params` to the connector set in `engine_kwargs.vllm.kv_transfer_config`. One that keeps KV in a
store lets the rest of a moved request load its prefix instead of computing it again.

Invariants (tests/unit/host/test_kv_transfer.py):
- a request of which the weights are not known, about which no plugin says anything, or whose plugin fails is an error,
  because what a connector keeps or finds for it may be of other weights; only an empty answer is nothing to tell.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.prompts import PromptGroup
from verl_fuse.spec.step import RequestView


def has_connector(config: Any) -> bool:
    """Whether vLLM has a KV connector in this composed configuration."""
    return bool(OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config"))


class Transfers:
    """Asks the plugins of this process."""

    def __init__(self, config: Any) -> None:
        self._config = config
        self._hook: Any = None

    def tell(
        self,
        sampling_params: Mapping[str, Any],
        group: PromptGroup | None,
        request_id: str,
        tokens: int,
        generated: int = 0,
        source: int | None = None,
    ) -> dict[str, Any]:
        """`sampling_params` with what the connector is told; the other arguments are the fields of RequestView."""
        if group is None:
            raise FuseError(
                f"request {request_id} belongs to no prompt: what a KV connector keeps of it may be of other weights"
            )
        view = RequestView(request_id, group.weights, tokens, generated, source)
        if self._hook is None:
            self._hook = plugins.load(self._config.fuse.disabled_plugins).hook
        try:
            told = self._hook.fuse_transfer(request=view, config=self._config)
        except Exception as error:
            raise FuseError(f"fuse_transfer failed: {type(error).__name__}: {error}") from error
        if told is None:
            raise FuseError(
                "no plugin says what the KV connector is told with a request: fuse.interstage.kv_transfer_params, or a "
                "fuse_transfer"
            )
        if not isinstance(told, Mapping):
            raise FuseError(
                f"fuse_transfer returned {told!r}; allowed: a mapping, or None to leave it to another plugin"
            )
        if not told:
            return dict(sampling_params)
        extra = sampling_params.get("extra_args") or {}
        return {**sampling_params, "extra_args": {**extra, "kv_transfer_params": dict(told)}}
