"""Lists the assumptions of a simulated step about the software beside the models and the cluster."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from types import MappingProxyType
from typing import Literal

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import bounded, read_block
from verl_fuse.spec.composed import ROLLOUT
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.step import VERL_POLL_INTERVAL

# No strategy: beside `zero_gradient` and `old_log_prob`, metrics are verl's (fuse.update.metrics=stock), which need a
# forward pass of every sample.
STOCK_METRICS = "stock_metrics"
_FEATURES = (
    *("observe", "streaming", "interstage", "pipeline", "realloc", "scaling", "speculation"),
    *("zero_gradient", "old_log_prob", "values", "share_prompts", "response_logits"),
)
SIMULATED_STRATEGIES: dict[str, frozenset[str]] = {
    "stock": frozenset(),
    **{name: frozenset({name}) for name in _FEATURES},
    "copies": frozenset({"old_log_prob", "copies"}),
    "stream": frozenset({"old_log_prob", "copies", "stream"}),
    "placement": frozenset({"placement"}),
}
"""Features of each strategy. `observe`: verl-fuse is on and only looks more often; `streaming`: finished samples are
inferred on the training workers while others generate (`fuse.interstage` with `layout: shared`); `zero_gradient`,
`old_log_prob`, `values`, `share_prompts`, `response_logits`: the switches of `fuse.update`, with metrics of what is
computed; `stream`: the update begins on released replicas (`fuse.update.stream`), each with a copy of the actor, and
`copies` is it in that layout after generation; `placement`: the critic on devices of its own, trained while the next
step generates (`fuse.placement`), where that is predicted to gain; `speculation` needs an acceptance; `realloc`: the
plan given replaces the stock placement."""


@dataclass(frozen=True)
class SimulationOptions:
    """Defaults are the same as in verl 0.9.1 (rollout config, V1 trainer) unless a field's comment gives another
    source. `read_block` checks values of users."""

    # The trainer: "fsdp" or "megatron"; None: whichever is faster, call by call.
    engine: Literal["fsdp", "megatron"] | None = None
    max_num_seqs: int = field(default=256, metadata=bounded(1))
    max_num_batched_tokens: int = field(default=8192, metadata=bounded(1))
    # Share of device memory for rollout weights and KV cache (gpu_memory_utilization).
    rollout_memory: float = field(default=0.5, metadata=bounded(0.01, 1.0))
    # Tensor parallelism of stock's rollout; None: whichever is fastest.
    rollout_tp: int | None = field(default=None, metadata=bounded(1))
    # Seconds between two looks at a running rollout: verl's, and verl-fuse's.
    stock_poll: float = field(default=VERL_POLL_INTERVAL, metadata=bounded(0.0))
    fuse_poll: float = field(default=0.05, metadata=bounded(0.0))
    # Every micro-batch is as long as its longest sequence (use_remove_padding=false).
    padded: bool = False
    # Gradient checkpointing in training.
    recompute: bool = True
    # Fewest finished samples inferred at once; freed replicas may take more.
    micro_group: int = field(default=8, metadata=bounded(1))
    # Seconds from the decision to migrate until a moved request is in its new queue; assumed.
    migration_latency: float = field(default=0.1, metadata=bounded(0.0))
    # "auto": whichever of prefilling again and moving the KV cache is faster.
    migration: Literal["auto", "prefill", "transfer"] = "auto"
    # Share of a generating replica that inference may use without slowing it; 0 unless measured.
    headroom: float = field(default=0.0, metadata=bounded(0.0, 1.0))
    # Replicas have devices of their own. None: yes, except on CPUs, whose cores all processes share.
    dedicated: bool | None = None
    # Correlation of a response's length with its prompt's usual length; assumed (RLHFless: 70 % of prompts move by < 50
    # tokens).
    predictability: float = field(default=0.8, metadata=bounded(0.0, 1.0))
    # Elastic replicas: share of a replica's requests after which the rest moves on; weight of time against cost.
    cut_fraction: float = field(default=0.8, metadata=bounded(0.5, 1.0))
    time_weight: float = field(default=0.5, metadata=bounded(0.0, 1.0))
    # The chance that a drafted token is accepted once the tokens before it are, for the strategies that draft; None
    # leaves these strategies out.
    acceptance: float | None = field(default=None, metadata=bounded(0.0, 1.0))
    # Method of the fused pipeline schedule (verl_fuse/schedule/methods.py).
    schedule: str = "greedy"


def of_plan(options: SimulationOptions, plan: Plan) -> SimulationOptions:
    """Return the options with what a plan's overrides say of the rollout, where the options have their defaults."""
    planned = {
        name: value
        for name, key in (("max_num_seqs", "max_num_seqs"), ("rollout_memory", "gpu_memory_utilization"))
        if (value := plan.overrides.get(f"{ROLLOUT}.{key}")) is not None
        and getattr(options, name) == getattr(SimulationOptions(), name)
    }
    return read_block(SimulationOptions, {**asdict(options), **planned}, "options") if planned else options


def features_of(strategy: str, named: Mapping[str, str] = MappingProxyType({})) -> frozenset[str]:
    """Return the features of a strategy, or of several with `+` between them; `named` has other names for strategies. A
    FuseError lists the strategies."""
    names = [name for part in strategy.split("+") for name in named.get(part, part).split("+")]
    if not all(name in (*SIMULATED_STRATEGIES, STOCK_METRICS) for name in names):
        allowed = ", ".join(dict.fromkeys([*SIMULATED_STRATEGIES, *named]))
        raise FuseError(f"strategy={strategy!r}; allowed: {allowed}, or several with + between them")
    return frozenset().union(*(SIMULATED_STRATEGIES.get(name, {name}) for name in names))
