import dataclasses
import itertools
import math

import pytest
from workloads import ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.memory import GPU_BUFFERS
from verl_fuse.plan.call_configs import LEFT_BUFFERS, configs_in_layouts, configs_on_sizes, least_bytes
from verl_fuse.plan.generation import GenerationEstimates
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.workload import Workload

COST = AnalyticCost(cluster_named("h100", 2))
GIB = 2**30


def call(name: str):
    return next(call for call in ppo().calls if call.name == name)


@pytest.mark.parametrize("name", [call.name for call in ppo().calls])
def test_every_config_fits_alone_and_none_is_beaten_in_everything(name: str):
    found = configs_on_sizes(call(name), ppo(), COST, (8,), 70 * GIB)
    assert found
    for config in found:
        assert config.peak <= 70 * GIB
        same = [o for o in found if o is not config and (o.layout == config.layout or name == "reference_infer")]
        assert not any(all(a <= b for a, b in zip(o.needs, config.needs, strict=True)) for o in same)


def test_offload_trades_seconds_for_resident_bytes():
    found = [
        w for w in configs_on_sizes(call("actor_train"), ppo(), COST, (8,), math.inf) if str(w.layout) == "tp4 dp2"
    ]
    here, away = ([w for w in found if w.offload is offload] for offload in (False, True))
    assert all(w.resident == 0 for w in away)
    assert min(w.seconds for w in here) < min(w.seconds for w in away)


def test_more_waves_take_less_memory_and_longer():
    found = sorted(
        (w for w in configs_on_sizes(call("actor_generate"), ppo(), COST, (1,), math.inf)), key=lambda w: w.microbatches
    )
    assert len(found) > 1
    assert all(a.seconds < b.seconds and a.active > b.active for a, b in itertools.pairwise(found))


def test_least_bytes_would_do():
    least = least_bytes(call("actor_train"), ppo(), COST, (8, 16))
    assert configs_on_sizes(call("actor_train"), ppo(), COST, (8, 16), least)
    assert not configs_on_sizes(call("actor_train"), ppo(), COST, (8, 16), least * 0.999)


def test_a_large_batch_is_cut_until_a_part_is_as_long_as_the_longest_sequence():
    """512 x 16 sequences of up to 21,504 tokens on eight devices: 1024 a rank, which 64 micro-batches do not make
    fit."""
    lengths = (LengthDistribution.parse(text) for text in ("fixed:1024", "lognormal:median=2650,sigma=0.8,max=20480"))
    actor = model_named("qwen2.5-7b")
    workload = Workload("grpo", 512, 16, *lengths, actor, None, actor)
    cost, layout = AnalyticCost(cluster_named("h100")), Layout(dp=8, shards=8)
    train = next(call for call in workload.calls if call.kind == "train")
    found = configs_in_layouts(train, workload, cost, [layout], 79.6 * GIB, GenerationEstimates(workload, cost))
    assert found
    assert all(config.microbatches > 64 for config in found)


def test_a_rollout_leaves_what_sleeps_beside_it():
    generate = configs_on_sizes(call("actor_generate"), ppo(), COST, (1,), math.inf)[0]
    alone = COST.memory(ppo().actor, "generate", generate.layout, kv_tokens=0)
    assert generate.active >= alone.active + LEFT_BUFFERS * GPU_BUFFERS
    with_sync = AnalyticCost(COST.cluster, dataclasses.replace(COST.engine, sync=7.0))
    handed = configs_on_sizes(call("actor_generate"), ppo(), with_sync, (1,), math.inf)[0]
    assert handed.seconds == pytest.approx(generate.seconds + 7.0)
