import itertools
import math

import pytest
from workloads import ppo

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.plan.call_configs import configs_on_sizes, least_bytes
from verl_fuse.spec.cluster import cluster_named

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
