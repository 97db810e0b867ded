"""The record of a feature: all that presets, advice, the simulator and the documentation know of it. A plugin hands its
records out (`fuse_features`) and imports neither torch nor verl for them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from verl_fuse.simulate.saving import Saving
from verl_fuse.spec.block import written
from verl_fuse.spec.composed import Get

if TYPE_CHECKING:
    # Numba takes a second to import.
    from verl_fuse.simulate.recorded import Recording

PresetName = Literal["observe", "safe", "fast"]
# Overrides of verl's configuration that switch verl-fuse on, in observe mode.
SWITCH = ("+fuse=default", "trainer.v1.trainer_mode=fuse")


@dataclass(frozen=True)
class Fits:
    """A row of the table "Does it fit my set-up?": the feature in a user's words, and where it runs."""

    title: str
    algorithm: str
    training: str
    rollout: str
    tried: str


def _nothing(_get: Get) -> str | None:
    return None


@dataclass(frozen=True)
class Feature:
    """`keys` of the block `fuse` switch the feature on; the first is its switch. `presets`: the keys that a preset sets
    beside them, by the presets that try the feature. `idle` returns the reason why it has nothing to do in a run,
    `slower` the measurement by which it makes a run slower, `takes` the memory that a user must have for it, or None.

    `measured`: seconds of stock verl over seconds with the feature, of a step or of the part of it that the feature
    shortens, as its README has them (1: no gain was measured). `strategy` is the simulator's
    (verl_fuse/simulate/options.py), empty where it has none; `beside` the feature whose strategy is part of it, and
    whose gain is not its own. `saving` is its saving on a recorded run, which is a `bound` where no run can reach it;
    `most` tells the most it could save where a replay cannot tell, by the seconds of each stage.
    """

    name: str
    keys: Mapping[str, Any]
    presets: Mapping[PresetName, Mapping[str, Any]] = field(default_factory=dict)
    idle: Callable[[Get], str | None] = _nothing
    slower: Callable[[Get], str | None] = _nothing
    takes: Callable[[Get], str | None] = _nothing
    measured: float = 1.0
    strategy: str = ""
    beside: str = ""
    saving: Callable[["Recording"], Saving] | None = None
    bound: bool = False
    most: Callable[[Mapping[str, float]], str] | None = None
    fits: Fits | None = None

    @property
    def switch(self) -> str:
        """Return the key of `fuse` that tells whether the feature is on."""
        return next(iter(self.keys))

    @property
    def overrides(self) -> tuple[str, ...]:
        """Return the overrides of verl's configuration that switch the feature on."""
        return tuple(f"fuse.{key}={written(value)}" for key, value in self.keys.items())

    @property
    def assumed(self) -> tuple[str, ...]:
        """Return the overrides that predictions of the feature assume beside those: the keys of the preset `fast`."""
        return tuple(f"fuse.{key}={written(value)}" for key, value in self.presets.get("fast", {}).items())
