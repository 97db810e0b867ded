"""Measured costs: met where measured, analytic elsewhere."""

import dataclasses

import numpy as np
import pytest
from tables import TINY, table

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import VERL
from verl_fuse.cost.floors import NO_FLOORS
from verl_fuse.cost.model import Batch
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.table import ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import Cluster, Device, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model_names import model_named

TABLE = dataclasses.replace(table(), engine=NO_FLOORS)
CLUSTER = Cluster(1, 2, TABLE.device, 1e10, 1e10, 1e10)
COST = ProfiledCost.of(TABLE, CLUSTER)


def test_a_forward_is_embedding_blocks_and_head():
    """Block and head at 4 x 256 tokens, PARTS' second and fifth; parts that know tokens only take
    them at the longest length."""
    root = (4 * 256) ** 0.5
    assert max(COST.stage_seconds(TINY, Layout(), Batch.equal(4, 256))) == pytest.approx(1e-4 * root * (3 * 2 + 5 + 1))


def test_a_deeper_model_of_the_same_blocks_is_covered():
    deeper = dataclasses.replace(TINY, layers=6)
    assert COST.block(deeper, Layout(), Batch.equal(4, 256)) == COST.block(TINY, Layout(), Batch.equal(4, 256))


def test_decoding_reads_the_decode_grid():
    once = COST.decode(TINY, Layout(), 4.0, 4 * 256.0)
    assert once == pytest.approx(1e-4 * (3 * 4 * (4 * 256) ** 0.5 + 7 * (4 * 16) ** 0.5))
    both = COST.decode(TINY, Layout(), np.array([4.0, 16.0]), np.array([4 * 256.0, 16 * 16.0]))
    assert both[0] == pytest.approx(once)


def test_floors_come_on_top():
    engine = dataclasses.replace(
        NO_FLOORS, decode_step=1.0, request=2.0, microbatch=3.0, call=4.0, update=5.0, sequence=6.0
    )
    floored, layout, batch = dataclasses.replace(COST, engine=engine), Layout(), Batch.equal(4, 64)
    assert floored.decode(TINY, layout, 4.0, 64.0) - COST.decode(TINY, layout, 4.0, 64.0) == pytest.approx(1 + 4 * 6)
    assert floored.prefill(TINY, layout, batch) - COST.prefill(TINY, layout, batch) == pytest.approx(1 + 4 * 2)
    assert floored.infer(TINY, layout, batch, 2) - COST.infer(TINY, layout, batch, 2) == pytest.approx(4 + 2 * 3)
    train = [cost.train(TINY, layout, batch, 2, 2, recompute=False) for cost in (floored, COST)]
    assert train[0] - train[1] == pytest.approx(4 + 2 * (2 * 3 + 5))


@pytest.mark.parametrize(("model", "layout"), [(model_named("llama-7b"), Layout()), (TINY, Layout(tp=2))])
def test_what_was_not_measured_stays_analytic(model, layout: Layout):
    cluster, batch = cluster_named("H100"), Batch.equal(4, 256)
    profiled, analytic = ProfiledCost.of(profile_of(cluster.device), cluster), AnalyticCost(cluster, VERL)
    assert profiled.stage_seconds(model, layout, batch) == analytic.stage_seconds(model, layout, batch)
    assert profiled.decode(model, layout, 4.0, 64.0) == analytic.decode(model, layout, 4.0, 64.0)
    backward = [cost.stage_seconds(model, layout, batch, backward=True) for cost in (profiled, analytic)]
    assert backward[0] == backward[1]
    assert profiled.update(model, layout) == analytic.update(model, layout)


def profile_of(device: Device) -> ProfileTable:
    return dataclasses.replace(table(), device=device)


def test_a_measured_model_has_the_measured_optimizer():
    (found,) = TABLE.models
    assert COST.optimizer(TINY, Layout(), 1e6) == 1e6 / found.optimizer_rate


H100 = cluster_named("h100").device


@pytest.mark.parametrize(
    ("measured", "cluster"),
    [
        (TABLE.device, "h100"),
        (dataclasses.replace(H100, name="NVIDIA H100 80GB HBM3"), "cpu"),
        (dataclasses.replace(H100, name="NVIDIA H100 80GB HBM3"), "l40s"),
        (dataclasses.replace(H100, name="NVIDIA L40S", memory=44.4 * 2**30), "h100"),
    ],
)
def test_a_profile_of_another_device_is_refused(measured: Device, cluster: str):
    machines = cluster_named(cluster)
    with pytest.raises(FuseError) as error:
        ProfiledCost.of(profile_of(measured), machines)
    assert str(error.value).startswith(f"profile of the device {measured.name} (")
    assert f"the cluster's devices are {machines.device.name} (" in str(error.value)


def test_names_and_memory_of_one_device_may_differ_a_little():
    """CUDA's names are not the built-in ones; a CPU's profile has the memory of the machine, not of a core."""
    hopper = dataclasses.replace(H100, name="NVIDIA H100 80GB HBM3", memory=79.2 * 2**30)
    assert ProfiledCost.of(profile_of(hopper), cluster_named("h100")).table
    host = dataclasses.replace(TABLE.device, memory=512.0 * 2**30)
    assert ProfiledCost.of(profile_of(host), cluster_named("cpu")).table


def test_cost_models_can_be_keys_of_a_cache():
    assert {COST: 1}[COST] == 1
