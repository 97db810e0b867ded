"""Hooks of the plugin `speculation`."""

import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verl_fuse.hookspecs import Configured, Trainer, hookimpl
from verl_fuse.spec.block import read_block
from verl_fuse.spec.composed import Get, getter, on_accelerators
from verl_fuse.spec.contract import Contract
from verl_fuse.spec.events import Event, SetUp, StageBegun, StepBegun
from verl_fuse.spec.timeline import REQUEST, UPDATE_WEIGHTS, Timeline
from verl_fuse_speculation.config import SpeculationConfig
from verl_fuse_speculation.contracts import CONTRACTS
from verl_fuse_speculation.engine import GRAPHS, engine_arguments
from verl_fuse_speculation.features import FEATURES
from verl_fuse_speculation.passes import Passes, speculation_metrics
from verl_fuse_speculation.refusals import ENGINE, refusals
from verl_fuse_speculation.shelf import say_step

logger = logging.getLogger(__name__)

FOLDER = "speculation"


class SpeculationPlugin(Configured):
    """Let the rollout engines draft from history, and report the outcome."""

    HOOK_API = 2
    block, features, refused = SpeculationConfig, FEATURES, staticmethod(refusals)

    def __init__(self) -> None:
        self._block = SpeculationConfig()
        self._passes: Passes | None = None
        # The drafters that left passes, the replicas that generated, and by how many more replicas than drafters there
        # were at the last warning.
        self._heard: set[str] = set()
        self._generated: set[str] = set()
        self._unheard = 0
        # The step's rollout is over by then (Unix seconds): engines sleep, and what follows is validation.
        self._over = math.inf

    @hookimpl
    def fuse_contracts(self, config: Mapping[str, Any] | None) -> Sequence[Contract]:
        return CONTRACTS if config is None or getter(config)("fuse.speculation.enabled") else ()

    @hookimpl
    def fuse_overrides(self, config: Mapping[str, Any], run_dir: Path) -> Mapping[str, Any]:
        get = getter(config)
        if not get("fuse.speculation.enabled"):
            return {}
        block = read_block(SpeculationConfig, get("fuse.speculation"), "fuse.speculation")
        folder = str(run_dir / FOLDER)
        arguments = engine_arguments(block.tokens, block.history_megabytes << 20, block.epochs, folder)
        found = {}
        for name, argument in arguments.items():
            if isinstance(argument, dict):
                # The user's other keys of the block stay.
                found |= {f"{ENGINE}.{name}.{key}": value for key, value in argument.items()}
            else:
                found[f"{ENGINE}.{name}"] = argument
        return found | _graphs(get)

    @hookimpl
    def fuse_setup(self, trainer: Trainer) -> None:
        self._block = trainer.block("speculation")

    @hookimpl
    def fuse_event(self, event: Event) -> None:
        if not self._block.enabled:
            return
        match event:
            case SetUp(run_dir=run_dir):
                self._passes = Passes(run_dir / FOLDER)
                # These passes belong to the run that this run goes on from.
                while self._news():
                    pass
            case StageBegun(name=name, time=time) if name == UPDATE_WEIGHTS:
                self._over = time
            case StepBegun(step=step) if self._passes is not None:
                self._over = math.inf
                try:
                    say_step(self._passes.folder, step)
                except OSError as error:
                    logger.warning("drafters were not told that step %d begins: %s", step, error)

    def _news(self) -> Mapping[str, Any]:
        """Return the passes of each drafter since the last call; none where the disk refuses, which costs no
        rollout."""
        assert self._passes is not None, "asked after SetUp"
        try:
            return self._passes.news()
        except OSError as error:
            logger.warning("what drafters counted cannot be read: %s", error)
            return {}

    @hookimpl
    def fuse_metrics(self, timeline: Timeline) -> Mapping[str, float]:
        if self._passes is None:
            return {}
        found = self._news()
        self._heard |= found.keys()
        self._listen()
        self._generated |= {
            span.track for span in timeline.spans if span.name == REQUEST and span.args.get("response_tokens")
        }
        return speculation_metrics(
            [passes[(passes["step"] == timeline.step) & (passes["time"] <= self._over)] for passes in found.values()]
        )

    def _listen(self) -> None:
        """Warn of drafters that left nothing, a step after their replicas generated: files may take their time."""
        assert self._passes is not None, "asked after SetUp"
        missing = len(self._generated) - len(self._heard)
        if missing > self._unheard:
            self._unheard = missing
            logger.warning(
                "fuse.speculation: of %d replicas that generated, %d left nothing in %s; they draft from what "
                "they generated themselves alone. Nodes do not share this folder (set fuse.run_dir, or "
                "trainer.default_local_dir, to one that they share), or drafting ended there (run.log says why)",
                len(self._generated), missing, self._passes.folder,
            )  # fmt: skip


def _graphs(get: Get) -> dict[str, str]:
    """Return the mode of graphs for an engine with drafts; none where the user chose one, or where vLLM has no graphs
    of whole passes (on CPUs, and with contexts cut over ranks)."""
    key = f"{ENGINE}.compilation_config"
    chosen = get(key)
    if isinstance(chosen, str) or get(f"{key}.cudagraph_mode") is not None or not on_accelerators(get):
        return {}
    return {} if (get(f"{ENGINE}.decode_context_parallel_size") or 1) > 1 else {f"{key}.cudagraph_mode": GRAPHS}
