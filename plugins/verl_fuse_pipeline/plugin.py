"""Hooks of the plugin `pipeline`."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.spec.composed import getter
from verl_fuse.spec.contract import Contract
from verl_fuse_pipeline.config import PipelineConfig
from verl_fuse_pipeline.contracts import CONTRACTS
from verl_fuse_pipeline.features import FEATURES
from verl_fuse_pipeline.refusals import enabled, refusals


class PipelinePlugin(Configured):
    """Put the fused update of actor and critic in place."""

    HOOK_API = 2
    block, features, refused = PipelineConfig, FEATURES, staticmethod(refusals)

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return CONTRACTS if config is None or enabled(getter(config)) else ()

    @hookimpl
    def fuse_worker_class(self, model: str, base: type, config: Mapping[str, Any]) -> type | None:
        if not enabled(getter(config)):
            return None
        from verl_fuse_pipeline.megatron.worker import pipeline_worker_class

        return pipeline_worker_class(model, base)

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        block: PipelineConfig = trainer.block("pipeline")
        if not block.enabled or block.schedule == "serial":
            return
        # The solvers take a second to import; the extra `megatron` brings what the update needs.
        from verl_fuse_pipeline.fused import FusedUpdates
        from verl_fuse_pipeline.policy import fused_schedule

        solve = partial(fused_schedule, wanted=block.schedule, seconds=block.solve_seconds)
        trainer.add_part(lambda host, groups: FusedUpdates(host, groups, host.run_stage, solve, block.timeout))
