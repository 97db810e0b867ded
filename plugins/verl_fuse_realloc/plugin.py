"""Hooks of the plugin `realloc`."""

from collections.abc import Generator, Mapping, Sequence
from typing import Any

from verl_fuse.hookspecs import Configured, hookimpl
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse.spec.block import read_block
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Contract
from verl_fuse_realloc import contracts
from verl_fuse_realloc.config import ReallocConfig
from verl_fuse_realloc.features import FEATURES
from verl_fuse_realloc.refusals import refusals, syncs


class ReallocPlugin(Configured):
    """Put the sync by shards in place."""

    HOOK_API = 2
    block, features, refused = ReallocConfig, FEATURES, staticmethod(refusals)

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        if config is None:
            return (*contracts.SYNC_CONTRACTS, *contracts.MEGATRON_SYNC_CONTRACTS)
        get = getter(config)
        megatron = contracts.MEGATRON_SYNC_CONTRACTS if get("actor_rollout_ref.actor.strategy") == "megatron" else ()
        return (*contracts.SYNC_CONTRACTS, *megatron) if syncs(get) else ()

    @hookimpl(wrapper=True)
    def fuse_worker_class(
        self, model: str, base: type, config: Mapping[str, Any]
    ) -> Generator[None, type | None, type | None]:
        # The class extends the class that another plugin makes of verl's: a run may train fused and send shards.
        found = yield
        get = getter(config)
        if model != "actor" or not syncs(get):
            return found
        block = read_block(ReallocConfig, get("fuse.realloc"), "fuse.realloc")
        options = TransferOptions(block.timeout, block.checksums)
        from verl_fuse_realloc.sync.hybrid import shard_sync_worker_class

        return shard_sync_worker_class(found or base, options)
