"""What a change does to a recorded run: micro-batches counted by hand, seconds and bytes of a cost model in between."""

import dataclasses

import pytest
from omegaconf import OmegaConf
from tuned_run import ACTOR, ROLLOUT, run

from verl_fuse.cost.profiled import cost_model
from verl_fuse.cost.recorded import RecordedStep
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.model_names import model_named
from verl_fuse.tune.predicted import Effect, RecordedWork, effect, more_at_limits

BUDGET, SIZE, PACKED = (
    f"{ACTOR}.{name}" for name in ("ppo_max_token_len_per_gpu", "ppo_micro_batch_size_per_gpu", "use_dynamic_bsz")
)
PASS_BUDGET, KEPT = f"{ROLLOUT}.log_prob_max_token_len_per_gpu", "actor_rollout_ref.model.enable_gradient_checkpointing"
REQUESTS = f"{ROLLOUT}.max_num_seqs"
COST = cost_model(cluster_named("h100"))


def recorded(changes: dict | None = None, **stages: float) -> RecordedWork:
    """On each of 8 ranks 16 samples of 300 tokens a step, in two mini-batches."""
    config = OmegaConf.create(run({BUDGET: 1002, PASS_BUDGET: 16384, **(changes or {})}))
    steps = [RecordedStep({}, (100,) * 128, (200,) * 128, tuple(i % 4 for i in range(128)))] * 2
    return RecordedWork(config, stages or {"update_actor": 4.0}, steps, lambda role: model_named("llama-7b"))


@pytest.mark.parametrize(("budget", "calls"), [(8016, 2), (1600, 4), (501, 10)])
def test_micro_batches_are_counted_as_verl_cuts_them(budget: int, calls: int):
    # 2400 tokens of a rank's mini-batch, in parts of 1002.
    assert effect(recorded(), {BUDGET: budget}, None) == Effect(6.0, calls, None, None)
    # A second time through the samples.
    twice = recorded({f"{ACTOR}.ppo_epochs": 2})
    assert effect(twice, {BUDGET: budget}, None) == Effect(12.0, 2 * calls, None, None)
    assert effect(twice, {BUDGET: budget}, COST) == dataclasses.replace(
        effect(recorded(), {BUDGET: budget}, COST), before=12.0, after=2 * calls
    )
    padded = recorded({PACKED: False, SIZE: 2})
    assert effect(padded, {SIZE: 8}, None) == Effect(8.0, 2.0, None, None)
    assert effect(padded, {PACKED: True}, None) == Effect(8.0, 6.0, None, None)


def test_a_rank_has_no_more_micro_batches_than_rows():
    assert effect(recorded(), {BUDGET: 100}, None) == Effect(6.0, 16.0, None, None)


def test_a_change_that_cuts_every_stage_as_before_saves_nothing():
    run = recorded(update_actor=4.0, old_log_prob=1.0)
    assert effect(run, {PASS_BUDGET: 32064}, COST) == Effect(0.0, 0.0, 0.0, 0.0)
    # The run made no such pass.
    assert effect(recorded(), {PASS_BUDGET: 1002}, COST) == Effect(0.0, 0.0, 0.0, 0.0)


def test_fewer_micro_batches_and_kept_activations_save_seconds_and_take_memory():
    for changes in ({BUDGET: 8016}, {KEPT: False}):
        found = effect(recorded(), changes, COST)
        assert found is not None
        assert 0 < found.seconds < 4.0
        assert found.more_bytes > 0
        # What the stage took is the run's, not the model's.
        twice = effect(recorded(update_actor=8.0), changes, COST)
        assert (twice.seconds, twice.more_bytes) == (pytest.approx(2 * found.seconds), found.more_bytes)
    smaller = effect(recorded(), {BUDGET: 501}, COST)
    assert smaller.seconds < 0 == smaller.more_bytes


def test_memory_at_the_longest_samples_grows_with_rows_and_not_with_budgets():
    """Samples of 300 tokens were recorded, and may have 501."""
    padded = recorded({PACKED: False, SIZE: 2, "actor_rollout_ref.model.use_remove_padding": False})
    as_recorded = more_at_limits(dataclasses.replace(padded, config=padded.config), {}, COST)
    assert as_recorded is not None
    assert as_recorded > 0
    sizes = [more_at_limits(padded, {SIZE: size}, COST) for size in (1, 2, 8)]
    assert sizes[0] < as_recorded == sizes[1] < sizes[2]
    # Of a mini-batch's eight rows a budget of 1002 holds three of 300 tokens, or two of 501.
    assert 0 < more_at_limits(recorded(), {}, COST) < 0.1 * sizes[2]
    assert more_at_limits(recorded(), {KEPT: False}, COST) > 0
    unknown = recorded({f"{ACTOR}.strategy": "megatron"})
    assert more_at_limits(unknown, {}, COST) is None


def test_what_follows_a_key_changes_with_it():
    budget = "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"
    packed = "actor_rollout_ref.ref.log_prob_use_dynamic_bsz"
    found = recorded({budget: f"${{{BUDGET}}}", packed: True}, ref=1.0)
    # 4800 tokens of a rank.
    assert effect(found, {BUDGET: 501}, None) == Effect(5.0, 10.0, None, None)
    assert effect(found, {BUDGET: 501}, None) == effect(found, {budget: 501}, None)
    # The configuration is as it was, with what follows.
    config = OmegaConf.create(run({BUDGET: 1002, budget: f"${{{BUDGET}}}"}))
    before = OmegaConf.to_yaml(config)
    kept = dataclasses.replace(found, config=config)
    for key in (BUDGET, budget, "critic.ppo_infer_max_token_len_per_gpu"):
        assert effect(kept, {key: 501}, None) is not None
    assert OmegaConf.to_yaml(config) == before


def test_rows_with_padding_are_as_long_as_the_longest_beside_them():
    lengths = [300, 100] * 64
    step = RecordedStep({}, (0,) * 128, tuple(lengths), (0,) * 128)

    def saved(padded: bool, **changes: object) -> float:
        base = {"actor_rollout_ref.model.use_remove_padding": not padded, PACKED: False, SIZE: 1}
        found = dataclasses.replace(recorded(base), steps=[step])
        return effect(found, changes, COST).seconds

    # Two rows at a time need half the calls for half as many tokens more.
    assert saved(True, **{SIZE: 2}) < saved(False, **{SIZE: 2})
    # Of 1600 tokens of a rank's mini-batch 800 at a time are four rows.
    assert saved(True, **{PACKED: True, BUDGET: 800}) == saved(True, **{SIZE: 4})


def test_more_requests_at_once_take_fewer_passes():
    """32 requests of a replica, of 200 tokens each, 8 at a time; the other three replicas have as many."""
    few = recorded({REQUESTS: 8}, gen=8.0)
    found = effect(few, {REQUESTS: 16}, COST)
    # Half the passes, each of which takes hardly longer.
    assert found is not None
    assert 3.5 < found.seconds < 4.0
    all_at_once = effect(few, {REQUESTS: 32}, COST)
    assert 5.0 < all_at_once.seconds < 6.0
    assert effect(few, {REQUESTS: 64}, COST) == all_at_once
    assert effect(recorded({REQUESTS: 16}, gen=8.0), {REQUESTS: 8}, COST).seconds < -7.0
    both = effect(recorded({REQUESTS: 8}, gen=8.0, update_actor=4.0), {REQUESTS: 16, BUDGET: 8016}, COST)
    assert both.seconds == pytest.approx(found.seconds + effect(recorded(), {BUDGET: 8016}, COST).seconds)


def test_on_a_cpu_a_packed_micro_batch_attends_as_one_sequence():
    """So that one large micro-batch is dearer than several."""
    budgets = {BUDGET: 501}
    here, there = (recorded({"trainer.device": device, BUDGET: 8016}) for device in ("cpu", "cuda"))
    costs = [effect(run, budgets, COST).seconds for run in (here, there)]
    assert costs[0] > costs[1]


@pytest.mark.parametrize(
    ("changes", "base"),
    [
        # The run has no generation.
        ({REQUESTS: 32}, {}),
        ({BUDGET: 8016}, {f"{ACTOR}.strategy": "megatron"}),
        ({BUDGET: 8016}, {"actor_rollout_ref.model.lora_rank": 8}),
    ],
)
def test_nothing_is_told_where_it_is_not_known(changes: dict, base: dict):
    assert effect(recorded(base), changes, COST) is None
