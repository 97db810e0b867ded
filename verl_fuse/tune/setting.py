"""What is known of one exact setting of verl: a key whose values train the same, up to rounding."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from verl_fuse.spec.composed import Get

# Keys of verl-fuse's features begin so.
FEATURES = "fuse."
Role: TypeAlias = Literal["actor", "reference", "rollout", "critic", "reward", "feature"]
Value: TypeAlias = int | float | bool | str | list[Any] | None
# What a run must have beside the role: a mixture of experts, adapters (LoRA), an accelerator.
Wants: TypeAlias = Literal["experts", "adapters", "accelerator"]


@dataclass(frozen=True)
class Rule:
    """Values that depend on the run: `says` in words; `tried` returns them for the setting's key in a composed
    configuration, no value where the configuration does not tell enough."""

    says: str
    tried: Callable[[Get, str], tuple[Value, ...]]


@dataclass(frozen=True)
class Reader:
    """Code of verl, or of a library that verl hands the key to, that reads it: `target` (module:Class.method) has the
    expression `reads` (owner.name; `owner.get("name")` counts as one)."""

    target: str
    reads: str


@dataclass(frozen=True)
class Setting:
    """One key of verl's configuration, and why other values of it change no mathematics.

    `engines` are the strategies (fsdp, fsdp2, megatron) of the role that read it, of a rollout its names (vllm, sglang,
    trtllm). `default` is verl's; a key that is not in verl's files (`added`) has it in verl's code. A key in `needs`
    must have one of its values, else the setting has no effect or verl refuses it. `together` get the same value, and
    `sets` has for a value what must be set with it. `rounds`: sums are made in another order or by other kernels.
    `cuts_mini_batches`: ranks get other rows, so that with several mini-batches a step other samples share an update.
    `ends_resume`: checkpoints made before do not fit afterwards.
    """

    key: str
    role: Role
    engines: tuple[str, ...]
    default: Value
    values: tuple[Value, ...] | Rule
    reason: str
    readers: tuple[Reader, ...]
    rounds: bool = False
    cuts_mini_batches: bool = False
    ends_resume: bool = False
    needs: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    wants: frozenset[Wants] = frozenset()
    together: tuple[str, ...] = ()
    sets: Mapping[Value, Mapping[str, Value]] = field(default_factory=dict)
    added: bool = False
