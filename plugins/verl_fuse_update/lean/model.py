"""Refuses models whose updates cannot be lean: models with gradients that do not come from advantages, or with
randomness by which passes differ."""

from collections.abc import Collection, Iterable, Iterator
from typing import Any

from torch.nn import Dropout

from verl_fuse.errors import FuseError
from verl_fuse.spec.composed import RANDOM, TOWERS
from verl_fuse_update.lean.options import LeanOptions

# Keys of Megatron's configuration of a model: randomness, statistics that every forward pass changes, and capacity for
# which rows of a micro-batch displace each other.
_PASSES = (
    "hidden_dropout",
    "attention_dropout",
    "moe_input_jitter_eps",
    "moe_router_force_load_balancing",
    "fp8",
    "fp4",
    "moe_expert_capacity_factor",
)
# A router of the first kind spreads the tokens of a whole micro-batch in training, and else token by token; one of the
# second kind adds a loss of all rows, which the coefficient alone does not: verl sets the kind to "none" and leaves it.
_SINKHORN, _AUXILIARY = "sinkhorn", "aux_loss"
# These keys add to the gradients of every row, count rows, or divide by the rows that are computed.
_ROWS = (
    "moe_z_loss_coeff",
    "moe_router_enable_expert_bias",
    "mtp_num_layers",
    "calculate_per_token_loss",
)


def check_model(engine: Any, options: LeanOptions) -> None:
    """Refuse a model of which an update cannot leave out exactly what `options` say."""
    if options.skip_old_log_prob:
        check_passes(engine, "fuse.update.skip_old_log_prob")
    if options.skip_zero_gradient:
        # verl leaves parameters of a tower that no sample reaches without a gradient; here all parameters have one.
        towers = {name for name in TOWERS if hasattr(engine.model_config.hf_config, name)}
        auxiliary = ["moe_aux_loss_coeff"] if any(_AUXILIARY in kind for kind in _kinds(engine)) else []
        of_rows = _configured(engine, [*_ROWS, *auxiliary])
        _refuse("fuse.update.skip_zero_gradient", {*_of_passes(engine), *of_rows, *towers})


def check_passes(engine: Any, switch: str) -> None:
    """Refuse, by the key `switch`, a model that computes something else in training than in inference."""
    _refuse(switch, set(_of_passes(engine)))


def _refuse(switch: str, found: Collection[str]) -> None:
    if found:
        raise FuseError(f"{switch}=true: not with a model that has {', '.join(sorted(found))}")


def _of_passes(engine: Any) -> Iterator[str]:
    yield from _configured(engine, _PASSES)
    if _SINKHORN in (kinds := _kinds(engine)):
        yield f"{_BALANCING}={', '.join(kinds)}"
    yield from _dropouts(engine)


def _configured(engine: Any, names: Iterable[str]) -> Iterator[str]:
    transformer = getattr(engine, "tf_config", None)
    for name in names:
        value = getattr(transformer, name, None)
        if any(value) if isinstance(value, list | tuple) else value:
            yield f"{name}={value}"


_BALANCING = "moe_router_load_balancing_type"


def _kinds(engine: Any) -> list[str]:
    """Return how routers balance their tokens."""
    value = getattr(getattr(engine, "tf_config", None), _BALANCING, None)
    return [str(kind) for kind in (value if isinstance(value, list) else [value])]


def _dropouts(engine: Any) -> Iterator[str]:
    modules = engine.module if isinstance(engine.module, list) else [engine.module]
    for part in (part for whole in modules for part in whole.modules()):
        for name in ("p", *RANDOM):
            value = getattr(part, name, None)
            if isinstance(value, float) and value > 0 and (name != "p" or isinstance(part, Dropout)):
                yield f"{type(part).__name__}.{name}={value}"
