"""The invariants of the analytic model, and numbers that can be worked out by hand."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.calibration import EAGER, GRAPHS
from verl_fuse.cost.collectives import DeviceGroup
from verl_fuse.cost.model import Batch
from verl_fuse.spec.cluster import Cluster, Mesh, cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named

LLAMA = model_named("llama-7b")
MOE = model_named("qwen3-30b-a3b")
A100 = cluster_named("A100-80G", nodes=4)

Question = Callable[[AnalyticCost, Batch], float]
QUESTIONS: dict[str, Question] = {
    "forward": lambda cost, batch: max(cost.stage_seconds(LLAMA, Layout(tp=8, pp=4), batch)),
    "backward": lambda cost, batch: max(
        cost.stage_seconds(LLAMA, Layout(tp=2, cp=2), batch, backward=True, recompute=True)
    ),
    "infer": lambda cost, batch: cost.infer(LLAMA, Layout(tp=4, dp=8), batch, 2),
    "train": lambda cost, batch: cost.train(LLAMA, Layout(tp=4, pp=4, dp=2), batch, 4, 8),
    "moe": lambda cost, batch: cost.train(MOE, Layout(tp=4, dp=8, ep=8), batch, 4, 1),
    "prefill": lambda cost, batch: cost.prefill(LLAMA, Layout(tp=2), batch),
    "decode": lambda cost, batch: float(cost.decode(LLAMA, Layout(tp=2), batch.sequences, batch.tokens)),
    "moe decode": lambda cost, batch: float(cost.decode(MOE, Layout(tp=2), batch.sequences, batch.tokens)),
}
BATCHES = [Batch.equal(16, 64), Batch.equal(16, 1024), Batch.equal(512, 1024)]


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("engine", [GRAPHS, EAGER], ids=str)
def test_more_or_longer_sequences_never_take_less_time(question: Question, engine):
    seconds = [question(AnalyticCost(A100, engine), batch) for batch in BATCHES]
    assert 0 < seconds[0] <= seconds[1] <= seconds[2]
    assert seconds[0] < seconds[2]


def faster(cluster: Cluster, **factors: float) -> Cluster:
    device = dataclasses.replace(
        cluster.device, **{k: v * getattr(cluster.device, k) for k, v in factors.items() if hasattr(cluster.device, k)}
    )
    links = {k: v * getattr(cluster, k) for k, v in factors.items() if not hasattr(cluster.device, k)}
    return dataclasses.replace(cluster, device=device, **links)


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("what", ["flops", "bandwidth", "intra_bandwidth", "inter_bandwidth"])
def test_faster_hardware_never_takes_more_time(question: Question, what: str):
    for batch in BATCHES:
        assert question(AnalyticCost(faster(A100, **{what: 2.0})), batch) <= question(AnalyticCost(A100), batch)


@pytest.mark.parametrize("model", [LLAMA, MOE, LLAMA.as_value_model()], ids=lambda model: model.name)
def test_stages_sum_to_the_whole_model(model: Model):
    cost, batch = AnalyticCost(A100), Batch.equal(64, 512)
    whole = sum(cost.stage_seconds(model, Layout(tp=2), batch))
    staged = sum(cost.stage_seconds(model, Layout(tp=2, pp=4), batch))
    hop = cost.network.send(2, 2 * batch.tokens * model.hidden / 2)
    assert staged == pytest.approx(whole + 3 * hop)


def test_the_stage_with_the_most_blocks_sets_the_pace():
    """Thirty-two blocks on three stages: eleven, eleven and ten."""
    cost, three, four = AnalyticCost(A100), Layout(pp=3), Layout(pp=4)
    blocks = 28 * (11 - 8) * LLAMA.block_parameters / (A100.device.bandwidth * cost.efficiency.bandwidth)
    assert cost.update(LLAMA, three) - cost.update(LLAMA, four) == pytest.approx(blocks)
    context = np.array([0.0, 1e6])
    read = [float(np.diff(cost.decode(LLAMA, layout, 64.0, context))[0]) for layout in (three, four)]
    assert read[0] / read[1] == pytest.approx(11 / 8)
    # Of a block: keys and values of 4,096 units in bf16.
    assert cost.kv_capacity(LLAMA, three, 11 * 16384 * 1000) == 1000
    assert cost.kv_capacity(LLAMA, three, 11 * 16384 * 1000 - 1) == 999


def test_every_mini_batch_ends_with_an_update():
    """The same micro-batches in twice as many mini-batches: no pipeline, which would drain each time."""
    cost, layout, batch = AnalyticCost(A100), Layout(tp=2, dp=4), Batch.equal(64, 1024)
    two, four = (cost.train(LLAMA, layout, batch, *parts) for parts in ((2, 4), (4, 2)))
    assert four - two == pytest.approx(2 * cost.update(LLAMA, layout))


def test_gradients_are_summed_over_data_and_context_ranks_alike():
    cost = AnalyticCost(A100)
    alone, data, both = (cost.update(LLAMA, layout) for layout in (Layout(), Layout(dp=8), Layout(dp=2, cp=4)))
    assert both == data != alone


def test_a_prompt_is_not_cut_over_the_stages_that_read_it():
    cost, layout = AnalyticCost(A100), Layout(pp=2)
    for count, parts in ((1, 1), (2, 2), (6, 2)):
        batch, part = Batch.equal(count, 2048), Batch.equal(count / parts, 2048)
        floor = cost.engine.decode_step + cost.engine.request * count
        alone = cost.prefill(LLAMA, Layout(), part) - cost.engine.decode_step - cost.engine.request * count / parts
        hop, head = cost.network.send(1, 2 * part.tokens * LLAMA.hidden), cost.head(LLAMA, layout, part.sequences)
        # The last stage has the head, and is the slowest.
        last = (alone - head) / 2 + head + hop
        assert cost.prefill(LLAMA, layout, batch) == pytest.approx(floor + alone + 2 * hop + (parts - 1) * last)


def test_copies_of_a_sharded_model_sum_their_shares_of_the_gradients():
    """One token: communication decides."""
    cost, batch = AnalyticCost(A100), Batch.equal(1, 1)
    one, two = (cost.block(LLAMA, Layout(dp=dp, shards=8), batch, backward=True) for dp in (8, 16))
    share = 2 * 2 * LLAMA.block_parameters / 8
    assert two - one == pytest.approx(cost.network.reduce(DeviceGroup(2, 8), share))
    assert two > one


def test_experts_of_other_nodes_are_reached_over_the_network():
    """Every token goes to its eight experts and back: twice 8 * hidden values of bf16 per token,
    24/32 of them to other nodes."""
    cost, batch = AnalyticCost(A100), Batch.equal(64, 1024)
    blocks = [cost.block(MOE, layout, batch) for layout in (Layout(dp=32), Layout(dp=32, ep=32))]
    moved = 2 * 2 * batch.tokens * 8 * MOE.hidden * 24 / 32
    network = 25e9 * cost.efficiency.network
    assert blocks[1] - blocks[0] == pytest.approx(moved / network, rel=0.01)


def test_context_ranks_pass_keys_and_values_round():
    cost, batch = AnalyticCost(A100), Batch.equal(1, 65536)
    whole, split = (cost.block(LLAMA, layout, batch) for layout in (Layout(), Layout(cp=8)))
    passed = 2 * 2 * batch.tokens * LLAMA.kv_heads * LLAMA.head_dim * 7 / 8 / (300e9 * cost.efficiency.network)
    assert split == pytest.approx(whole / 8 + passed, rel=0.01)


def test_pipelined_replicas_read_their_caches_side_by_side():
    """Two stages hold half of the layers each and follow each other: a cache is read in half the time."""
    cost, context = AnalyticCost(A100), np.array([0.0, 1e6])
    alone, staged = (cost.decode(LLAMA, layout, 64.0, context) for layout in (Layout(), Layout(pp=2)))
    assert staged[1] - staged[0] == pytest.approx((alone[1] - alone[0]) / 2)


def test_decoding_works_on_arrays():
    cost, layout = AnalyticCost(A100), Layout(tp=2, pp=2)
    sequences, context = np.array([1, 8, 256]), np.array([100, 8000, 256_000])
    together = cost.decode(LLAMA, layout, sequences, context)
    alone = [float(cost.decode(LLAMA, layout, n, c)) for n, c in zip(sequences, context, strict=True)]
    assert together.tolist() == pytest.approx(alone)


def test_a_large_batch_runs_at_the_calibrated_fraction_of_peak():
    cost = AnalyticCost(A100)
    batch = Batch.equal(16, 2048)
    flops = 2 * batch.tokens * LLAMA.active_parameters
    assert 0.4 < flops / max(cost.stage_seconds(LLAMA, Layout(), batch)) / A100.device.flops < cost.efficiency.matmul


@pytest.mark.parametrize("step", [0.0, 0.04], ids=["the device is slower", "the host is slower"])
def test_the_host_waits_for_the_device_unless_it_runs_ahead(step: float):
    def seconds(**floors) -> float:
        changed = dataclasses.replace(GRAPHS, **{"decode_step": step, "sequence": 1e-5, "handover": 0.003, **floors})
        return float(AnalyticCost(A100, changed).decode(LLAMA, Layout(), 64.0, 0.0))

    device, host = seconds(overlap=False, decode_step=0.0, sequence=0.0), step + 64e-5
    assert host > device if step else device > host
    assert seconds(overlap=False) == pytest.approx(device + host)
    assert seconds(overlap=True) == pytest.approx(max(device, host) + 0.003)


def test_what_a_framework_adds_to_calls_and_to_the_weight_sync():
    batch, layout, mesh = Batch.equal(64, 512), Layout(dp=8), Mesh(0, 8)
    bare, driven = (
        AnalyticCost(A100, dataclasses.replace(GRAPHS, token=token, sync_byte=token)) for token in (0.0, 1e-3)
    )
    calls = [cost.infer(LLAMA, layout, batch, 1) for cost in (bare, driven)]
    assert calls[1] - calls[0] == pytest.approx(1e-3 * batch.tokens)
    moves = [cost.sync(LLAMA, (mesh, layout), (mesh, layout)) for cost in (bare, driven)]
    assert moves[1] - moves[0] == pytest.approx(1e-3 * 2 * LLAMA.parameters)


def test_operators_launched_one_by_one_cost_sharded_layouts_more():
    batch = Batch.equal(1, 64)
    floors = dataclasses.replace(GRAPHS, sharded_block=1.0)
    assert AnalyticCost(A100, floors).block(LLAMA, Layout(shards=1), batch) == pytest.approx(1.0)
    assert AnalyticCost(A100, floors).block(LLAMA, Layout(), batch) < 1.0


def test_folded_experts_need_one_sum_over_tensor_ranks_and_a_smaller_exchange():
    cost, batch = AnalyticCost(A100), Batch.equal(8, 512)
    folded, cut = (cost._block_collectives(MOE, Layout(tp=2, dp=4, ep=ep), batch.tokens) for ep in (8, 4))
    size = 2 * batch.tokens * MOE.hidden
    once, k = cost.network.reduce(DeviceGroup(2, 1), size), MOE.experts_per_token
    assert cut == pytest.approx(2 * once + 2 * cost.network.exchange(DeviceGroup(4, 2), size * k))
    assert folded == pytest.approx(once + 2 * cost.network.exchange(DeviceGroup(8, 1), size * k / 2))
