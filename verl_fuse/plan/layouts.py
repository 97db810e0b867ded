"""Lists the layouts that a model call may have on a mesh of a size.

Invariants (tests/unit/plan/test_layouts.py):
- a layout uses exactly the devices of the mesh and divides the model;
- tensor and context ranks of one stage stay within a node; a stage's devices are a divisor or a multiple of a node;
- every data-parallel rank gets as many sequences as the others, in training in every mini-batch;
- tensor ranks cut experts, or, but in the rollout, fold into expert ranks where there are more of these than ranks of
  data and context;
- FSDP, which does not generate, shares a model out over all devices, over 1, 2, 4, ... nodes.
"""

from verl_fuse.spec.layout import Layout, shard_sizes
from verl_fuse.spec.model import Model
from verl_fuse.spec.workload import CallKind, Workload

# Splitting a sequence over devices costs communication; shorter ones never need it.
LONG = 8192


def legal_layouts(model: Model, kind: CallKind, workload: Workload, size: int, per_node: int) -> tuple[Layout, ...]:
    """Return the layouts of `size` devices for one call; none if no layout divides the model."""
    sequences = workload.sequences
    unit = sequences // workload.minibatches if kind == "train" else sequences
    long = workload.prompt.maximum + workload.response.maximum > LONG and kind != "generate"
    found: list[Layout] = []
    for tp in _powers(per_node):
        for cp in _powers(per_node // tp) if long else (1,):
            if size % (tp * cp):
                continue
            for dp in _divisors(size // (tp * cp)):
                stage = tp * cp * dp
                if unit % dp or (stage % per_node and per_node % stage):
                    continue
                if tp == 1 and stage == size and kind != "generate":
                    found += [Layout(dp=dp, cp=cp, shards=shards) for shards in shard_sizes(size, per_node)]
                for ep in _powers(min(stage, model.experts)) if model.experts else (1,):
                    if (dp * cp) % ep == 0:
                        found.append(Layout(tp, size // stage, dp, cp, ep))
                    elif stage % ep == 0 and kind != "generate":
                        found.append(Layout(tp, size // stage, dp, cp, ep, etp=1))
    return tuple(layout for layout in found if layout.fault(model) is None)


def _powers(largest: int) -> tuple[int, ...]:
    return tuple(2**i for i in range(max(1, largest).bit_length()) if 2**i <= largest)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)
