"""Describes the computation of one training step: the algorithm, its batch, its lengths, its models.

Invariants (tests/unit/spec/test_workload.py):
- calls form an acyclic graph in which every `after` names a call of this workload;
- PPO has a critic, GRPO has none; a call of a role exists only if the role has a model;
- mini-batches are equal numbers of whole prompts, like verl's;
- a file with an unknown key, name or value is refused, naming it and the allowed values.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import check_counts, read_block
from verl_fuse.spec.length_files import lengths_from
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_from
from verl_fuse.spec.yaml_file import read_yaml

# Larger than any batch that was ever trained on; a larger number is a mistake, and its simulation would not end.
MOST_SEQUENCES = 2**18
MOST_EPOCHS = 1000

Role = Literal["actor", "critic", "reference", "reward"]
CallKind = Literal["generate", "infer", "train"]
# Where the KL divergence from the reference is: in the actor's loss, or in the reward.
Kl = Literal["loss", "reward"]


class Call(NamedTuple):
    """One model function call of a step. The calls without `after` wait for the train calls of the previous step."""

    name: str
    role: Role
    kind: CallKind
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Workload:
    """`prompts` per step with `samples` responses each; training makes `epochs` passes in `minibatches` updates each.

    `zero_gradient`: share of the samples all advantages of which are 0. `kl` needs a reference; None beside one is the
    loss with GRPO, the reward with PPO. Without `values` the critic's update computes the values, before the actor's
    update."""

    algorithm: Literal["ppo", "grpo"]
    prompts: int
    samples: int
    prompt: LengthDistribution
    response: LengthDistribution
    actor: Model
    critic: Model | None = None
    reference: Model | None = None
    reward: Model | None = None
    epochs: int = 1
    minibatches: int = 1
    old_log_prob: bool = True
    zero_gradient: float = 0.0
    kl: Kl | None = None
    values: bool = True

    def __post_init__(self) -> None:
        check_counts("workload", self, ("prompts", "samples", "epochs", "minibatches"))
        if not 0 <= self.zero_gradient <= 1:
            raise FuseError(f"workload: zero_gradient={self.zero_gradient!r}; needs a share from 0 to 1")
        if self.algorithm not in ("ppo", "grpo"):
            raise FuseError(f"workload: algorithm={self.algorithm!r}; needs ppo or grpo")
        if (self.critic is not None) != (self.algorithm == "ppo"):
            have = "none" if self.critic is None else self.critic.name
            raise FuseError(
                f"workload: critic={have}; needs {'a model' if self.algorithm == 'ppo' else 'none'} with "
                f"{self.algorithm}"
            )
        if self.kl is not None and self.reference is None:
            raise FuseError(f"workload: kl={self.kl!r}; needs a reference")
        if self.sequences > MOST_SEQUENCES:
            raise FuseError(
                f"workload: prompts={self.prompts} with samples={self.samples} are {self.sequences} sequences a step; "
                f"needs at most {MOST_SEQUENCES}"
            )
        if self.epochs > MOST_EPOCHS:
            raise FuseError(f"workload: epochs={self.epochs}; needs at most {MOST_EPOCHS}")
        if self.prompts % self.minibatches:
            raise FuseError(
                f"workload: minibatches={self.minibatches} do not divide prompts={self.prompts}: verl's mini-batches "
                "are equal numbers of whole "
                "prompts; allowed: a divisor of the prompts"
            )

    @property
    def sequences(self) -> int:
        return self.prompts * self.samples

    @property
    def prompts_per_update(self) -> int:
        return self.prompts // self.minibatches

    @property
    def kl_term(self) -> Kl | None:
        """Return where the KL divergence is; None without a reference."""
        if self.reference is None:
            return None
        return self.kl or ("reward" if self.algorithm == "ppo" else "loss")

    def model(self, role: Role) -> Model:
        found: Model | None = getattr(self, role)
        if found is None:
            raise FuseError(f"workload: no model for the role {role}")
        return found

    @property
    def calls(self) -> tuple[Call, ...]:
        """Return the calls in an order that respects `after`."""
        generate = Call("actor_generate", "actor", "generate")
        inferring: tuple[tuple[Role, object], ...] = (
            ("reward", self.reward),
            ("reference", self.reference),
            ("critic", self.critic is not None and self.values),
            ("actor", self.old_log_prob),
        )
        scores = [Call(f"{role}_infer", role, "infer", (generate.name,)) for role, used in inferring if used]
        ready = tuple(call.name for call in scores) or (generate.name,)
        train = [Call("critic_train", "critic", "train", ready)] if self.critic is not None else []
        of_values = () if self.values else tuple(call.name for call in train)
        return (generate, *scores, *train, Call("actor_train", "actor", "train", (*ready, *of_values)))

    @classmethod
    def read(cls, path: Path, given: Mapping[str, Any] = MappingProxyType({})) -> "Workload":
        """Read a workload from YAML; paths in it are relative to the file. `given` keys take the place of the file's.
        Every error names the file."""
        data = read_yaml(path)
        try:
            return cls.from_dict({**data, **given} if isinstance(data, dict) else data, path.parent)
        except FuseError as error:
            raise FuseError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Any, base: Path = Path()) -> "Workload":
        """Build from parsed YAML. Models are size names or paths of a config.json; lengths are text forms or
        FILE#COLUMN.

        Critic and reward model get a value head; a missing `samples` is one.
        """
        read = read_block(_File, data, "workload")
        critic, reference, reward = (
            model_from(name, base) if name else None for name in (read.critic, read.reference, read.reward)
        )
        return cls(
            algorithm=read.algorithm,
            prompts=read.prompts,
            samples=read.samples,
            prompt=lengths_from(read.prompt, base),
            response=lengths_from(read.response, base),
            actor=model_from(read.actor, base),
            critic=critic.as_value_model() if critic else None,
            reference=reference,
            reward=reward.as_value_model() if reward else None,
            epochs=read.epochs,
            minibatches=read.minibatches,
            old_log_prob=read.old_log_prob,
            zero_gradient=read.zero_gradient,
            kl=read.kl,
        )


@dataclass(frozen=True)
class _File:
    """The keys that a workload file has."""

    algorithm: Literal["ppo", "grpo"]
    prompts: int
    prompt: str
    response: str
    actor: str
    samples: int = 1
    critic: str | None = None
    reference: str | None = None
    reward: str | None = None
    epochs: int = 1
    minibatches: int = 1
    old_log_prob: bool = True
    zero_gradient: float = 0.0
    kl: Kl | None = None
