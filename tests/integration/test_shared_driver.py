"""The driver's part of computing prompts once, alone: its neighbours are values or records of calls. verl itself is
imported, not run."""

import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Literal

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from transfer_queue import KVBatchMeta

    from verl_fuse_update.shared import PlacedPrompts

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]
PROMPTS, SAMPLES, RANKS = 4, 4, 2


def batch() -> KVBatchMeta:
    """Long prompts whose samples alternate: in verl's order no rank has all samples of one."""
    keys = [f"p{prompt}_{sample}_0" for sample in range(SAMPLES) for prompt in range(PROMPTS)]
    tags = [{"seq_len": 1001 + 10 * place, "prompt_len": 1000, "response_len": 1 + 10 * place} for place in range(16)]
    return KVBatchMeta(keys=keys, tags=tags, partition_id="train", extra_info={"before": 1})


def part(
    places: bool = True,
    ref_in_actor: bool = False,
    dynamic: bool = True,
    shuffle: bool = False,
    balance: bool = False,
    models: tuple[Literal["actor", "critic"], ...] = ("actor",),
) -> PlacedPrompts:
    passes = {"log_prob_use_dynamic_bsz": dynamic, "log_prob_micro_batch_size_per_gpu": 2}
    actor = {
        "ppo_mini_batch_size": 2,
        "use_dynamic_bsz": dynamic,
        "ppo_micro_batch_size_per_gpu": 2,
        "shuffle": shuffle,
    }
    config = {
        "actor_rollout_ref": {
            "actor": actor,
            "ref": passes,
            "rollout": {"n": SAMPLES, **passes},
            "model": {"use_remove_padding": False},
        },
        "critic": {"ppo_mini_batch_size": 4, "shuffle": shuffle},
    }
    asked = []

    def workers(name: str) -> SimpleNamespace:
        def take_tokens(model: str) -> list[tuple[int, int, int]]:
            asked.append((name, model))
            return [(70, 30, 10), (30, 10, 5)]

        ranks = {mesh: [0, 1] for mesh in ("actor", "ref", "train")}
        return SimpleNamespace(_dispatch_info=ranks, take_tokens=take_tokens)

    trainer = SimpleNamespace(
        config=OmegaConf.create(config),
        global_steps=3,
        ref_in_actor=ref_in_actor,
        actor_rollout_wg=workers("actor's"),
        ref_policy_wg=workers("reference's"),
        critic_wg=workers("critic's"),
    )
    made = PlacedPrompts(trainer, models, models if places else (), balance)
    made.asked = asked
    return made


def of_ranks(keys: list[str], mini_batches: int = 1) -> list[list[set[str]]]:
    """The prompts of each rank, by mini-batch."""
    share = len(keys) // RANKS
    each = share // mini_batches
    return [
        [
            {key.split("_")[0] for key in keys[rank * share + start : rank * share + start + each]}
            for rank in range(RANKS)
        ]
        for start in range(0, share, each)
    ]


@pytest.mark.parametrize("stage", ["old_log_prob", "ref"])
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_pass_has_prompts_whole_on_a_rank_and_gives_the_batch_back_in_its_order(stage, dynamic):
    given, got = batch(), []

    def stock(rows: KVBatchMeta, metrics: dict) -> KVBatchMeta:
        got.append(rows)
        rows.extra_info["temperature"] = 0.7
        metrics["seen"] = 1.0
        # As verl's pass for old log-probs: what the queue returns.
        return replace(rows, fields=["log_probs"], extra_info={})

    shared, metrics = part(dynamic=dynamic), {}
    back = shared.method(stage, stock)(given, metrics)
    (rows,) = got
    assert given.keys == batch().keys
    assert sorted(rows.keys) == sorted(given.keys)
    assert [len(prompts) for prompts in of_ranks(rows.keys)[0]] == [2, 2]
    assert all(rows.tags[place] == given.tags[given.keys.index(key)] for place, key in enumerate(rows.keys))
    assert (back.keys, back.tags, back.fields) == (given.keys, given.tags, ["log_probs"])
    assert given.extra_info == {"before": 1, "temperature": 0.7}
    assert metrics == {"seen": 1.0}
    if not dynamic:
        share = len(rows) // RANKS
        for rank in range(RANKS):
            mine = rows.keys[rank * share : (rank + 1) * share]
            assert all(len({key.split("_")[0] for key in mine[at : at + 2]}) == 1 for at in range(0, share, 2))


def test_an_update_has_them_whole_within_mini_batches_unless_another_part_places_them():
    got = []
    part().method("update_actor", lambda rows, metrics: got.append(rows))(batch(), {})
    first, second = batch().keys[:4] + batch().keys[8:12], batch().keys[4:8] + batch().keys[12:]
    share = len(got[0]) // RANKS
    mine = [got[0].keys[rank * share : (rank + 1) * share] for rank in range(RANKS)]
    assert sorted(mine[0][:4] + mine[1][:4]) == sorted(first)
    assert sorted(mine[0][4:] + mine[1][4:]) == sorted(second)
    assert [[len(prompts) for prompts in ranks] for ranks in of_ranks(got[0].keys, 2)] == [[2, 2], [2, 2]]
    for left in (part(places=False), part(shuffle=True)):
        left.method("update_actor", lambda rows, metrics: got.append(rows))(batch(), {})
        assert got[-1].keys == batch().keys
    assert part().method("update_critic", stock := object()) is stock
    assert part().method("values", stock) is stock


def test_saved_tokens_are_those_of_all_calls_of_a_step():
    shared = part()

    def run(stage: str) -> None:
        metrics = {"perf/mfu/actor": 0.4, "actor/loss": 1.0} if stage == "update_actor" else {}
        shared.method(stage, lambda rows, metrics: rows)(batch(), metrics)
        # 25 of 100 tokens were copies.
        assert metrics == ({} if stage != "update_actor" else {"perf/mfu/actor": pytest.approx(0.3), "actor/loss": 1.0})

    run("old_log_prob")
    run("ref")
    run("update_actor")
    saved = 1 - 15 / 40
    assert shared.metrics == {f"fuse/{work}_shared_tokens": saved for work in ("old_log_prob", "ref", "update")}
    assert shared.asked == [("actor's", "actor"), ("reference's", "ref"), ("actor's", "actor")]
    run("ref")
    assert shared._tokens["ref"] == (200, 80, 30)
    shared._trainer.global_steps = 4
    run("old_log_prob")
    assert shared.metrics == {"fuse/old_log_prob_shared_tokens": saved}


def test_a_critic_has_an_order_of_its_own_for_values_and_update():
    got, metrics = [], {"perf/mfu/critic": 0.4}
    shared = part(models=("critic",))
    back = shared.method("values", lambda rows, metrics: got.append(rows) or rows)(batch(), {})
    assert back.keys == batch().keys
    shared.method("update_critic", lambda rows, metrics: got.append(rows))(batch(), metrics)
    # One mini-batch of the critic is two of the actor.
    for rows in got:
        assert sorted(rows.keys) == sorted(batch().keys)
        assert [len(prompts) for prompts in of_ranks(rows.keys)[0]] == [2, 2]
    assert metrics == {"perf/mfu/critic": pytest.approx(0.3)}
    assert shared.asked == [("critic's", "critic")] * 2
    assert set(shared.metrics) == {"fuse/values_shared_tokens", "fuse/update_critic_shared_tokens"}
    for stage in ("old_log_prob", "ref", "update_actor"):
        assert shared.method(stage, stock := object()) is stock
    part(models=("critic",), shuffle=True).method("update_critic", lambda rows, metrics: got.append(rows))(batch(), {})
    assert got[-1].keys == batch().keys


def test_adapters_reference_is_the_actor():
    shared = part(ref_in_actor=True)
    shared.method("ref", lambda rows, metrics: rows)(batch(), {})
    assert shared.asked == [("actor's", "actor")]


def test_workers_that_computed_nothing_saved_nothing():
    shared = part()
    shared._trainer.actor_rollout_wg.take_tokens = lambda model: [(0, 0, 0), (0, 0, 0)]
    shared.method("update_actor", lambda rows, metrics: rows)(batch(), {})
    assert shared.metrics == {}


def test_where_balance_is_on_the_order_says_what_it_saves():
    for balance in (True, False):
        metrics: dict[str, float] = {}
        part(balance=balance).method("update_actor", lambda rows, metrics: rows)(batch(), metrics)
        assert (metrics.pop("fuse/actor_balance_saved") > 0.2) if balance else metrics == {}
