"""The memory model against counts by hand and published formulas."""

import dataclasses

import pytest

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.cost.memory import GPU_BUFFERS, held_activations
from verl_fuse.cost.model import Batch
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named

LLAMA = model_named("llama-7b")
COST = AnalyticCost(cluster_named("H100", nodes=4))
BATCH = Batch.equal(4, 1024)


def test_training_states_are_eighteen_bytes_per_parameter_on_one_device():
    memory = COST.memory(LLAMA, "train", Layout())
    # The final norm is the only thing not counted.
    parameters = LLAMA.parameters - LLAMA.hidden
    assert (memory.weights, memory.gradients, memory.optimizer) == (2 * parameters, 4 * parameters, 12 * parameters)


def test_optimizer_states_are_shared_over_data_ranks_and_with_fsdp_everything():
    alone, shared = (COST.memory(LLAMA, "train", Layout(dp=dp)) for dp in (1, 8))
    assert (shared.weights, shared.optimizer) == (alone.weights, alone.optimizer / 8)
    for layout in (Layout(cp=8), Layout(dp=2, cp=4)):
        assert COST.memory(LLAMA, "train", layout).optimizer == shared.optimizer
    full = COST.memory(LLAMA, "train", Layout(dp=8, shards=8))
    assert full.static == pytest.approx(16 * (LLAMA.parameters - LLAMA.hidden) / 8)
    assert full.buffers == GPU_BUFFERS + 2 * 2 * LLAMA.block_parameters
    assert COST.memory(LLAMA, "train", Layout(dp=32, shards=8)).static == full.static


def test_a_block_holds_what_korthikanti_counts():
    """34 bytes per token and hidden unit with flash attention (arXiv 2205.05198, without the score matrix), for a
    plain MLP of four hidden."""
    model = Model("gpt", 1, 6144, 64, 64, 96, 8 * 6144 // 3, 51200)
    (held,) = held_activations(model, Layout(), 2048, recompute=False)
    assert held / 2048 / 6144 == pytest.approx(34, rel=0.06)
    (split,) = held_activations(model, Layout(tp=8), 2048, recompute=False)
    assert split == held / 8
    (inputs,) = held_activations(model, Layout(), 2048, recompute=True)
    assert inputs / 2048 / 6144 == 2


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages():
    layout, critic = Layout(tp=8, pp=4), LLAMA.as_value_model()
    held = held_activations(critic, layout, BATCH.tokens, recompute=False)[0]
    for count, in_flight in ((1, 1), (3, 3), (16, 4)):
        memory = COST.memory(critic, "train", layout, microbatch=BATCH, microbatches=count, recompute=False)
        assert memory.activations == pytest.approx(in_flight * held)


def test_the_fullest_stage_is_the_last_one_where_logits_take_more_than_micro_batches():
    layout = Layout(tp=8, pp=4)
    critic = LLAMA.as_value_model()
    memory, of_critic = (COST.memory(model, "train", layout, microbatch=BATCH) for model in (LLAMA, critic))
    logits = BATCH.tokens * LLAMA.vocabulary / 8
    assert memory.activations == pytest.approx(of_critic.activations + 10 * logits, rel=1e-3)
    many = [COST.memory(LLAMA, "train", layout, microbatch=BATCH, microbatches=n, recompute=False) for n in (1, 8)]
    held = held_activations(LLAMA, layout, BATCH.tokens, recompute=False)[0]
    assert many[0].activations == pytest.approx(held + 10 * logits)
    assert many[1].activations == pytest.approx(4 * held)


def test_the_fullest_stage_is_one_in_the_middle_where_it_has_a_block_more():
    """Thirty-two blocks on five stages: six, seven, seven, six and six; a block is larger than the embedding."""
    assert COST.memory(LLAMA, "infer", Layout(pp=5)).weights == 2 * 7 * LLAMA.block_parameters


def test_recomputation_saves_activations():
    kept, recomputed = (
        COST.memory(LLAMA, "train", Layout(tp=8), microbatch=BATCH, recompute=recompute).activations
        for recompute in (False, True)
    )
    assert recomputed < kept / 4


def test_kv_cache_with_shared_heads():
    """80 layers x 2 x 8 heads x 128 x 2 bytes a token; more tensor ranks than KV heads hold copies."""
    llama = model_named("llama-2-70b")
    sizes = [COST.memory(llama, "generate", Layout(tp=tp), kv_tokens=1000).kv for tp in (1, 8)]
    assert sizes == [327_680_000, 40_960_000]
    assert COST.memory(llama, "generate", Layout(tp=16), kv_tokens=1000).kv == 40_960_000
    assert COST.kv_capacity(llama, Layout(tp=8), 40_960_000) == 1000


def test_offloaded_states_are_there_only_while_the_call_runs():
    memory = COST.memory(LLAMA, "train", Layout(tp=8), microbatch=BATCH)
    offloaded = COST.memory(LLAMA, "train", Layout(tp=8), microbatch=BATCH, offload=True)
    assert offloaded.static == 0
    assert offloaded.total == memory.total


def test_experts_are_shared_out():
    moe = model_named("qwen3-30b-a3b")
    whole, shared = (COST.memory(moe, "infer", layout).weights for layout in (Layout(dp=8), Layout(dp=8, ep=8)))
    experts = 2 * moe.layers * moe.experts * moe.expert_parameters
    assert whole - shared == pytest.approx(experts * 7 / 8)


def test_a_tied_head_is_copied_to_the_last_stage():
    tied = dataclasses.replace(LLAMA, tied_embeddings=True)
    one, two = (COST.memory(tied, "infer", Layout(pp=pp)).weights for pp in (1, 2))
    assert one == 2 * (tied.parameters - tied.hidden)
    assert two == pytest.approx(one / 2, rel=0.02)
