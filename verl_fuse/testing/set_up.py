"""Stands for the trainer at `fuse_setup`, where no run is set up.

Invariant (tests/unit/testing/test_set_up.py): every member of `verl_fuse.hookspecs.Trainer` can be used, with the
arguments it takes there and no others.
"""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Trainer
from verl_fuse.spec.memory import RankMemory
from verl_fuse.spec.step import ReplicaView, Stage
from verl_fuse.testing.views import GRPO_STAGES


class SetUpTrainer:
    """A trainer for `fuse_setup`. `config` are values of verl's configuration by dotted key, `blocks` the blocks of
    `fuse` by plugin, `block` that of every other plugin. `used` has the features that plugins switch on, in order: the
    method's name, and its arguments by name."""

    def __init__(
        self,
        *,
        config: Mapping[str, Any] | None = None,
        blocks: Mapping[str, Any] | None = None,
        block: Any = None,
        replicas: Sequence[ReplicaView] = (),
        devices_each: int = 1,
        streamed_stages: Sequence[Stage] = GRPO_STAGES,
        memory: Mapping[str, Sequence[RankMemory]] | None = None,
        shares_prompts: Collection[str] = (),
    ) -> None:
        self.config: DictConfig = OmegaConf.create()
        for key, value in (config or {}).items():
            OmegaConf.update(self.config, key, value, force_add=True)
        self.devices_each, self.streamed_stages = devices_each, tuple(streamed_stages)
        self.used: list[tuple[str, dict[str, Any]]] = []
        self._blocks, self._block, self._replicas = dict(blocks or {}), block, tuple(replicas)
        self._memory, self._shares = memory, shares_prompts

    def block(self, plugin: str) -> Any:
        """Return the block given for this plugin; a FuseError tells which were given."""
        found = self._blocks.get(plugin, self._block)
        if found is None:
            given = ", ".join(self._blocks) or "none"
            raise FuseError(f"the trainer has no block {plugin!r}; given: {given}; add blocks={{{plugin!r}: ...}}")
        return found

    def replica_views(self) -> tuple[ReplicaView, ...]:
        """Return the replicas given."""
        return self._replicas

    def training_memory(self) -> Mapping[str, Sequence[RankMemory]]:
        """Return the memory given; a FuseError tells that none was."""
        if self._memory is None:
            raise FuseError(
                "training_memory was asked for, and the trainer has none; give memory={MODEL: [RankMemory]}"
            )
        return self._memory

    def shares_prompts(self, model: str = "actor") -> bool:
        """Tell whether `model` is among those given."""
        return model in self._shares

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return the method that switches a feature on, or adds a part: it notes its arguments in `used`."""
        method = getattr(Trainer, name, None) if name.startswith(("use_", "add_")) else None
        if method is None:
            raise AttributeError(f"a trainer has no {name!r}; see verl_fuse.hookspecs.Trainer")

        def use(*args: Any, **named: Any) -> None:
            bound = inspect.signature(method).bind(self, *args, **named)
            self.used.append((name, {key: value for key, value in bound.arguments.items() if key != "self"}))

        return use
