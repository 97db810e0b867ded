"""Values that depend on the run: a rule gives those that verl can run at the run's limits.

Invariants (tests/unit/tune/test_rules.py):
- a token budget holds the longest sequence that prompts and responses may have, on the ranks that share it;
- a micro-batch divides the rows of a rank;
- devices are divided without a rest, and ranks divide the rows that they train.
"""

import math
from collections.abc import Iterator

from verl_fuse.spec.composed import (
    ACTOR,
    CRITIC,
    REFERENCE,
    ROLLOUT,
    Get,
    data_parallel_ranks,
    has_critic,
    product,
    sequence_ranks,
)
from verl_fuse.tune.setting import Rule, Value

_PARALLEL = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_DEVICES = "nnodes", "n_gpus_per_node"
# Budgets double at most so often above the longest sequence; memory ends sooner.
_DOUBLINGS = 6
_MOST_SEQUENCES, _TOKENS = 4096, (2048, 65536)


def powers(low: int, high: int) -> Rule:
    """Powers of two from `low` to `high`, both powers of two."""
    return Rule(f"powers of two from {low} to {high}", lambda get, key: tuple(_powers(low, high)))


def _powers(low: int, high: int) -> Iterator[int]:
    while low <= high:
        yield low
        low *= 2


def _role(key: str) -> str:
    """Return the block of the role whose engine the key serves; the actor computes the rollout's log-probs."""
    return next((role for role in (REFERENCE, CRITIC) if key.startswith(f"{role}.")), ACTOR)


def _rows(get: Get, key: str) -> int | None:
    """Return the rows that a rank computes at once: of a mini-batch, or in a pass of the whole batch."""
    role = _role(key)
    size = "data.train_batch_size" if "log_prob" in key else f"{role}.ppo_mini_batch_size"
    prompts, samples, ranks = get(size), get(f"{ROLLOUT}.n"), data_parallel_ranks(get, role)
    return prompts * samples // ranks if prompts and samples and ranks and prompts * samples % ranks == 0 else None


def _budgets(get: Get, key: str) -> tuple[Value, ...]:
    prompt, response = get("data.max_prompt_length"), get("data.max_response_length")
    shared, rows = sequence_ranks(get, _role(key)), _rows(get, key)
    if not prompt or not response or not shared or not rows:
        return ()
    longest = math.ceil((prompt + response) / shared)
    return tuple(longest << doubling for doubling in range(_DOUBLINGS + 1) if not doubling or 1 << doubling <= 2 * rows)


def _micro_batches(get: Get, key: str) -> tuple[Value, ...]:
    rows = _rows(get, key)
    return tuple(size for size in range(1, rows + 1) if rows % size == 0) if rows else ()


def _requests(get: Get, key: str) -> tuple[Value, ...]:
    """Return numbers of requests of a replica, up to all that it gets; vLLM wants a token for each in a pass."""
    replica = product(get, ROLLOUT, ("tensor_model_parallel_size", "data_parallel_size"))
    devices, prompts, samples = product(get, "trainer", _DEVICES), get("data.train_batch_size"), get(f"{ROLLOUT}.n")
    if not replica or not devices or not prompts or not samples:
        return ()
    most = math.ceil(prompts * samples / max(1, devices // replica))
    limit = min(_MOST_SEQUENCES, get(f"{ROLLOUT}.max_num_batched_tokens") or _MOST_SEQUENCES)
    return tuple(count for count in _powers(8, limit) if count < 2 * most or count == 8)


def _pass_tokens(get: Get, key: str) -> tuple[Value, ...]:
    """Return tokens of a pass; verl raises fewer than the longest sequence where prompts are not computed in parts."""
    least = get(f"{ROLLOUT}.max_num_seqs") or 1
    if get(f"{ROLLOUT}.enable_chunked_prefill") is False:
        limits = get("data.max_prompt_length") or 0, get("data.max_response_length") or 0
        least = max(least, get(f"{ROLLOUT}.max_model_len") or sum(limits))
    return tuple(tokens for tokens in _powers(*_TOKENS) if tokens >= least)


def _replica(get: Get, key: str) -> tuple[Value, ...]:
    """Return sizes of one factor of a replica, within a node; its other factor stays."""
    node, devices = get("trainer.n_gpus_per_node"), product(get, "trainer", _DEVICES)
    other = "data_parallel_size" if key.endswith("tensor_model_parallel_size") else "tensor_model_parallel_size"
    fixed = get(f"{ROLLOUT}.{other}")
    if not node or not devices or not fixed:
        return ()
    return tuple(size for size in _powers(1, node) if node % size == 0 and devices % (size * fixed) == 0)


def _experts_of_replica(get: Get, key: str) -> tuple[Value, ...]:
    size = product(get, ROLLOUT, ("tensor_model_parallel_size", "data_parallel_size"))
    return tuple(dict.fromkeys((1, size))) if size else ()


def _divisors(get: Get, key: str) -> tuple[Value, ...]:
    """Return -1, for all devices, and sizes of shard groups of fewer."""
    devices = product(get, "trainer", _DEVICES) or 1
    return (-1, *(size for size in range(1, devices) if devices % size == 0))


def _sequence_parallel(get: Get, key: str) -> tuple[Value, ...]:
    node = get("trainer.n_gpus_per_node") or 1
    return tuple(size for size in _powers(1, node) if node % size == 0 and _trains_on(get, _role(key), size))


def _model_parallel(get: Get, key: str) -> tuple[Value, ...]:
    """Return sizes of one of Megatron's factors; its other two stay. Tensor-parallel ranks stay within a node."""
    block, _, name = key.rpartition(".")
    node, devices = get("trainer.n_gpus_per_node"), product(get, "trainer", _DEVICES)
    fixed = product(get, block, tuple(other for other in _PARALLEL if other != name))
    if not node or not devices or not fixed:
        return ()
    most = node if name == "tensor_model_parallel_size" else devices
    return tuple(size for size in range(1, most + 1) if most % size == 0 and _trains_on(get, _role(key), size * fixed))


def _trains_on(get: Get, role: str, each: int) -> bool:
    """Tell whether devices in groups of `each` are ranks that divide the rows of the mini-batches they train."""
    devices = product(get, "trainer", _DEVICES) or 1
    roles = (role, *([CRITIC] if role == ACTOR and get(f"{ACTOR}.strategy") == "megatron" and has_critic(get) else []))
    rows = [(get(f"{name}.ppo_mini_batch_size") or 0) * (get(f"{ROLLOUT}.n") or 0) for name in roles]
    return devices % each == 0 and all(number % (devices // each) == 0 for number in rows)


def _experts(get: Get, key: str) -> tuple[Value, ...]:
    devices = product(get, "trainer", _DEVICES) or 1
    return tuple(size for size in _powers(1, devices) if devices % size == 0)


def _expert_tensor(get: Get, key: str) -> tuple[Value, ...]:
    node = get("trainer.n_gpus_per_node") or 1
    return (None, *(size for size in _powers(1, node) if node % size == 0))


def _virtual(get: Get, key: str) -> tuple[Value, ...]:
    stages = get(f"{key.rpartition('.')[0]}.pipeline_model_parallel_size") or 1
    return (None, 2, 4) if stages > 1 else (None,)


def _packs(get: Get, key: str) -> tuple[Value, ...]:
    sizes = (
        (f"{REFERENCE}.log_prob_micro_batch_size_per_gpu",)
        if _role(key) == REFERENCE
        else (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu")
    )
    return (True, False) if all(get(size) for size in sizes) else (True,)


def _padding(get: Get, key: str) -> tuple[Value, ...]:
    role = _role(key)
    return (True, False) if sequence_ranks(get, role) == 1 else (True,)


def _fused(get: Get, key: str) -> tuple[Value, ...]:
    return ("torch", "triton", "liger") if get("trainer.device") != "cpu" else ("torch",)


def _captured(get: Get, key: str) -> tuple[Value, ...]:
    return (None, list(_powers(1, get(f"{ROLLOUT}.max_num_seqs") or 1)))


BUDGET = Rule("tokens, at least the longest prompt and response by the ranks that share a sequence", _budgets)
MICRO_BATCH = Rule("divisors of a rank's rows", _micro_batches)
REQUESTS = Rule("powers of two up to a replica's requests, at most the tokens of a pass", _requests)
PASS_TOKENS = Rule(
    "powers of two from 2048 to 65536, at least the requests, and a sequence without chunked prefill", _pass_tokens
)
REPLICA = Rule("powers of two that divide a node, and with the replica's other size all devices", _replica)
REPLICA_EXPERTS = Rule("1, or all devices of a replica", _experts_of_replica)
SHARDS = Rule("-1 (all devices) or a divisor of them", _divisors)
SEQUENCE_RANKS = Rule("powers of two within a node whose ranks divide the mini-batch", _sequence_parallel)
MODEL_RANKS = Rule(
    "divisors of the devices whose ranks divide the mini-batches; tensor-parallel in a node", _model_parallel
)
EXPERT_RANKS = Rule("powers of two that divide the devices", _experts)
EXPERT_TENSOR_RANKS = Rule("null (as other layers), or powers of two that divide a node", _expert_tensor)
VIRTUAL_STAGES = Rule("null, or chunks of layers a stage, with several stages", _virtual)
PACKING = Rule("true, or false where sizes of micro-batches are set", _packs)
PADDING = Rule("true, or false where no ranks share a sequence", _padding)
FUSED = Rule("torch, and on accelerators triton and liger", _fused)
CAPTURED = Rule("null (the engine's choice), or powers of two up to the requests", _captured)
