"""Gives a KV connector of the engines parameters with each request: asks the hook `fuse_transfer` where requests are
made.

vLLM hands `kv_transfer_params` to the connector set in `engine_kwargs.vllm.kv_transfer_config`. A connector that keeps
KV in a store lets the rest of a moved request load its prefix instead of computing it again.

Invariants (tests/unit/host/test_kv_transfer.py):
- a request with unknown weights, without an answer of a plugin, or with a plugin that fails is an error, because a
connector may keep or find KV of other weights for the request; only an empty answer means that there is nothing to
tell.
"""

from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.prompts import PromptGroup
from verl_fuse.spec.step import RequestView


def has_connector(config: Any) -> bool:
    """Tell whether vLLM has a KV connector in this composed configuration."""
    return bool(OmegaConf.select(config, "actor_rollout_ref.rollout.engine_kwargs.vllm.kv_transfer_config"))


class Transfers:
    """The plugins of this process, asked for KV transfers."""

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
        """Return `sampling_params` with the parameters for the connector; the other arguments are the fields of
        RequestView."""
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
