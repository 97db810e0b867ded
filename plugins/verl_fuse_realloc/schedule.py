"""`fuse.realloc.schedule`: in shards of how many ranks each model is trained, from which step on.

Invariants (tests/unit/realloc/test_layout_schedule.py):
- a step keeps what an earlier entry said, where it says nothing itself; before the first entry the configuration holds;
- a plan file in place of a block must differ from the configuration in nothing else.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.step import Refusal

Get = Callable[[str], Any]

KEY = "fuse.realloc.schedule"
FSDP_SIZE = {"actor": "actor_rollout_ref.actor.fsdp_config.fsdp_size", "critic": "critic.fsdp.fsdp_size"}
# What must be off for a model whose layout changes, and its value then.
_OFF: dict[str, dict[str, Any]] = {
    "actor": {
        "actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.offload_policy": False,
        "actor_rollout_ref.actor.fsdp_config.qat.enable": False,
        "actor_rollout_ref.model.enable_activation_offload": False,
        "actor_rollout_ref.model.lora_rank": 0,
        "actor_rollout_ref.model.lora.rank": 0,
    },
    "critic": {
        "critic.fsdp.ulysses_sequence_parallel_size": 1,
        "critic.fsdp.offload_policy": False,
        "critic.fsdp.qat.enable": False,
        "critic.model.enable_activation_offload": False,
        "critic.model.lora_rank": 0,
        "critic.model.lora.rank": 0,
    },
}
_STRATEGY = {"actor": "actor_rollout_ref.actor.strategy", "critic": "critic.strategy"}


@dataclass(frozen=True)
class LayoutSchedule:
    """(first step, `fsdp_size` by model), in order of steps; the first entry is the configuration's, for models that later ones name."""

    entries: tuple[tuple[int, Mapping[str, int]], ...]

    @classmethod
    def read(cls, get: Get) -> "LayoutSchedule":
        """From a configuration that `refusals` has nothing against."""
        later = sorted((step, _sizes(value)) for step, value in scheduled(get).items())
        named = {model for _, sizes in later for model in sizes}
        return cls(((1, {model: get(key) for model, key in FSDP_SIZE.items() if model in named}), *later))

    def wanted(self, step: int) -> Mapping[str, int]:
        """The `fsdp_size` of each model at a step."""
        return {model: size for first, sizes in self.entries if first <= step for model, size in sizes.items()}


def scheduled(get: Get) -> Mapping[Any, Any]:
    """The block as it is written; empty if there is none."""
    block = get(KEY)
    return OmegaConf.to_container(block) if isinstance(block, DictConfig) else block or {}  # type: ignore[return-value]


def refusals(get: Get) -> Iterator[Refusal]:
    """What keeps this configuration from changing layouts as its schedule says."""
    named: set[str] = set()
    for step, value in scheduled(get).items():
        key = f"{KEY}.{step}"
        if not isinstance(step, int) or isinstance(step, bool) or step < 2:
            yield Refusal(
                key,
                value,
                "needs a step from which it holds, a whole number >= 2; the first step's is the configuration's",
            )
        elif isinstance(value, str):
            found = list(_plan(key, value, get))
            yield from found
            named |= set() if found else _sizes(value).keys()
        elif not isinstance(value, Mapping) or not value or not value.keys() <= FSDP_SIZE.keys():
            yield Refusal(key, value, f"needs blocks for {', '.join(FSDP_SIZE)}, or a plan file")
        else:
            named |= value.keys()
            for model, block in value.items():
                yield from _block(f"{key}.{model}", block, get)
    if "critic" in named and not _has_critic(get):
        yield Refusal(KEY, "critic", "this run has no critic")
        named.discard("critic")
    if get("trainer.v1.trainer_mode") != "fuse":
        yield Refusal("trainer.v1.trainer_mode", get("trainer.v1.trainer_mode"), f"{KEY} needs fuse")
    for model in sorted(named):
        if get(_STRATEGY[model]) != "fsdp2":
            yield Refusal(
                _STRATEGY[model],
                get(_STRATEGY[model]),
                f"{KEY} needs fsdp2: shards of other engines are not known here",
            )
        for name, off in _OFF[model].items():
            if (get(name) or off) != off:
                yield Refusal(name, get(name), f"not with {KEY}: {off}")


def _block(key: str, block: Any, get: Get) -> Iterator[Refusal]:
    ranks = (get("trainer.nnodes") or 1) * (get("trainer.n_gpus_per_node") or 1)
    if not isinstance(block, Mapping) or set(block) != {"fsdp_size"}:
        yield Refusal(key, block, "needs a block of fsdp_size")
        return
    size = block["fsdp_size"]
    if not isinstance(size, int) or isinstance(size, bool) or (size != -1 and (size < 1 or ranks % size)):
        yield Refusal(f"{key}.fsdp_size", size, f"needs -1 (all ranks) or a divisor of the {ranks} ranks")


def _plan(key: str, path: str, get: Get) -> Iterator[Refusal]:
    try:
        wanted = _overrides(path)
        # `fuse.plan` is applied when all is checked.
        applied = _overrides(get("fuse.plan")) if get("fuse.plan") else {}
    except FuseError as error:
        yield Refusal(key, path, f"needs a plan file: {error}")
        return
    sizes = set(FSDP_SIZE.values())
    others = [name for name, value in wanted.items() if name not in sizes and applied.get(name, get(name)) != value]
    if others:
        text = f"while a run goes on only {', '.join(sorted(sizes))} can change; this plan also sets {', '.join(others[:5])}"
        yield Refusal(key, path, text + (f" and {len(others) - 5} more" if len(others) > 5 else ""))
    for model, name in FSDP_SIZE.items():
        if name in wanted:
            yield from _block(f"{key}.{model}", {"fsdp_size": wanted[name]}, get)


def _overrides(path: str) -> dict[str, Any]:
    # ++ stands before keys that verl's YAML lacks.
    return {name.removeprefix("++"): value for name, value in Plan.read(Path(path)).overrides.items()}


def _sizes(value: Any) -> dict[str, int]:
    """`fsdp_size` by model of an entry."""
    if isinstance(value, str):
        overrides = _overrides(value)
        return {model: overrides[key] for model, key in FSDP_SIZE.items() if key in overrides}
    return {model: block["fsdp_size"] for model, block in value.items()}


def _has_critic(get: Get) -> bool:
    """As verl decides it (`need_critic`)."""
    enabled = get("critic.enable")
    return get("algorithm.adv_estimator") == "gae" if enabled is None else bool(enabled)
