"""The driver's part of a lean update, alone: its neighbours are values or records of calls. verl
itself is imported, not run."""

import warnings
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from transfer_queue import KVBatchMeta

    from verl_fuse.host.upstream.advantages import has_gradient, without_gradient
    from verl_fuse_update import short_pass
    from verl_fuse_update.lean import driver as module
    from verl_fuse_update.lean.driver import LeanUpdates, saved_seconds
    from verl_fuse_update.lean.model import check_model
    from verl_fuse_update.lean.options import LEAN, LeanOptions

from verl_fuse.errors import FuseError

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]
BOTH = LeanOptions(skip_zero_gradient=True, skip_old_log_prob=True, metrics="computed")


# What the trainer knows of the step.
STEP = SimpleNamespace(with_gradient=[])


def batch(rows: int = 8, padding: int = 0) -> KVBatchMeta:
    tags = [{"seq_len": 10 * (row + 1), "is_padding": row >= rows - padding} for row in range(rows)]
    return KVBatchMeta(keys=[f"p{row}_0_0" for row in range(rows)], tags=tags, partition_id="train", extra_info={})


def lean(options: LeanOptions, step: int = 3, **actor) -> LeanUpdates:
    config = {
        "trainer": {"critic_warmup": 2},
        "algorithm": {"rollout_correction": {"bypass_mode": False}},
        "actor_rollout_ref": {
            "actor": {
                "ppo_mini_batch_size": 4,
                "ppo_epochs": 1,
                "use_dynamic_bsz": True,
                "shuffle": False,
                "calculate_entropy": False,
                **actor,
            },
            "model": {"use_remove_padding": True},
            "rollout": {"n": 2, "calculate_log_probs": False},
        },
    }
    workers = SimpleNamespace(_dispatch_info={"actor": [0, 1]}, log_probs_of_update=lambda asked: None)
    trainer = SimpleNamespace(
        config=OmegaConf.create(config),
        global_steps=step,
        actor_rollout_wg=workers,
        journal=SimpleNamespace(step=STEP),
    )
    said = []
    made = LeanUpdates(trainer, lambda name, category, work, **args: (said.append((name, args)), work()), options)
    made.said = said
    return made


def passes(updates: LeanUpdates, given: KVBatchMeta) -> bool:
    """Whether verl's pass is run."""
    ran = []
    updates.old_log_prob(given, {}, lambda batch, metrics: ran.append(1) or batch)
    return bool(ran)


def test_the_pass_is_left_out_of_steps_that_train_the_actor_on_mini_batches_whose_rows_are_known():
    updates = lean(BOTH)
    assert not passes(updates, batch(8))
    assert not passes(updates, batch(16)), "it waits for advantages"
    assert passes(updates, batch(12)), "verl refuses to cut them"
    assert passes(lean(BOTH, shuffle=True), batch(16)), "each rank draws its first mini-batch"
    assert not passes(lean(BOTH, shuffle=True), batch(8))
    assert passes(lean(BOTH, step=1), batch(8)), "the actor is not trained yet"
    assert not passes(lean(BOTH, step=2), batch(8)), "it is from this step on"
    assert passes(lean(LeanOptions(skip_zero_gradient=True)), batch(8))


def test_advantages_know_no_correction_while_there_are_no_old_log_probs():
    updates, seen = lean(BOTH), []

    def stock(given, metrics):
        seen.append(updates._trainer.config.algorithm.rollout_correction)
        return given

    for rows in (8, 16, 12):
        updates.old_log_prob(batch(rows), {}, lambda given, metrics: given)
        updates.advantage(batch(rows), {}, stock)
    assert seen == [None, None, {"bypass_mode": False}]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Which rows have a gradient; nothing else is read."""
    kept = [True, False] * 4
    monkeypatch.setattr(STEP, "with_gradient", kept)
    monkeypatch.setattr(module.LeanUpdates, "_of_old_log_probs", lambda self, rows: {"told": list(rows.keys)})
    return kept


def test_the_update_gets_verls_mini_batch_in_another_order_and_says_what_it_leaves_out(told):
    updates, given, trained, metrics = lean(BOTH), batch(8, padding=1), [], {}
    assert not passes(updates, given)

    def stock(asked, metrics):
        trained.append(asked)
        return asked

    assert updates.actor(given, metrics, stock) is given
    (asked,) = trained
    assert sorted(asked.keys) == sorted(given.keys)
    assert dict(zip(asked.keys, asked.tags, strict=True)) == dict(zip(given.keys, given.tags, strict=True))
    work = {
        key: tag["seq_len"]
        for (key, tag), kept in zip(zip(given.keys, given.tags, strict=True), told, strict=True)
        if kept
    }
    assert sorted(sum(work.get(key, 0) for key in rank) for rank in (asked.keys[:4], asked.keys[4:])) == [80, 80]
    assert asked.extra_info[LEAN] == BOTH
    assert given.extra_info == {}
    # Rows 1, 3 and 5 of seven, and the padding, which does not count.
    share = {"skipped_samples": 3 / 7, "skipped_tokens": 120 / 280, "own_log_probs": 1.0}
    assert updates.said == [("update_actor", pytest.approx(share))]
    assert {name: updates.metrics[f"fuse/update_{name}"] for name in share} == pytest.approx(share)
    assert metrics["told"] == [key for key, kept in zip(given.keys, told, strict=True) if kept]


@pytest.mark.parametrize(
    ("options", "size", "passed"),
    [
        ({}, None, [4, 5, 6, 7, 12, 13, 14, 15]),
        ({"short_pass": True}, None, [4, 6, 12, 14]),
        # Each rank gets as many whole micro-batches: the shortest rows fill them.
        ({"short_pass": True}, 3, [4, 5, 6, 7, 12, 14]),
        ({"short_pass": True}, 8, list(range(16))),
    ],
)
def test_the_first_mini_batch_and_rows_without_a_gradient_leave_the_pass(told, monkeypatch, options, size, passed):
    zeros, asked, ran, metrics = [], [], [], {}
    monkeypatch.setattr(short_pass, "_write_zeros", lambda rows, like, _: zeros.append((rows.keys, like.keys)))
    monkeypatch.setattr(STEP, "with_gradient", told * 2)
    updates, given = lean(LeanOptions(skip_old_log_prob=True, metrics="computed", **options)), batch(16)
    updates._trainer.config.actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu = size
    updates._trainer.actor_rollout_wg.log_probs_of_update = lambda rows: asked.append(rows.keys)

    def stock(rows, metrics):
        ran.append(rows)
        metrics["told"] = "of the pass"
        return rows

    updates.old_log_prob(given, metrics, stock)
    assert (ran, metrics, asked) == ([], {}, [])
    updates.actor(given, metrics, lambda rows, metrics: ran.append(rows))
    of_pass, of_update = ran
    names, first = given.keys, {*range(4), *range(8, 12)}
    assert sorted(of_pass.keys) == sorted(names[place] for place in passed)
    assert (of_update.fields, set(of_update.keys)) == (None, set(names))
    left = [names[place] for place in range(16) if place not in passed]
    assert zeros == ([(left, names[passed[0] : passed[0] + 1])] if left else [])
    assert [set(keys) for keys in asked] == [{names[place] for place in first}]
    assert asked == [of_update.keys[:4] + of_update.keys[8:12]]
    share = sum(10 * (place + 1) for place in range(16) if place not in passed) / sum(range(10, 170, 10))
    assert updates.metrics["fuse/update_own_log_probs"] == pytest.approx(share)
    assert updates.metrics["fuse/update_old_log_prob_passes"] == 0.0
    known = [place for place in sorted(first.union(passed)) if not options or place % 2 == 0]
    assert metrics["told"] == [names[place] for place in known]


def test_no_row_may_need_the_pass(told, monkeypatch):
    zeros = []
    monkeypatch.setattr(short_pass, "_write_zeros", lambda rows, like, _: zeros.append((rows.keys, like.keys)))
    monkeypatch.setattr(STEP, "with_gradient", [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4)
    updates, asked = lean(LeanOptions(skip_old_log_prob=True, metrics="computed", short_pass=True)), []
    updates._trainer.actor_rollout_wg.log_probs_of_update = lambda rows: asked.append(set(rows.keys))
    assert not passes(updates, batch(16))
    updates.actor(batch(16), {}, lambda rows, metrics: rows)
    assert zeros == [], "no row has a column"
    assert asked == [{batch(16).keys[place] for place in (*range(4), *range(8, 12))}]
    assert updates.metrics["fuse/update_own_log_probs"] == 1.0


@pytest.mark.parametrize(("metrics", "asks"), [("stock", True), ("computed", False)])
def test_log_probs_that_no_rank_computed_are_not_asked_for(monkeypatch, metrics, asks):
    asked = []
    monkeypatch.setattr(short_pass, "_write_zeros", lambda rows, like, column: None)
    monkeypatch.setattr(module.LeanUpdates, "_of_old_log_probs", lambda self, rows: {})
    monkeypatch.setattr(STEP, "with_gradient", [False] * 4 + [True] * 4 + [False] * 4 + [True] * 4)
    updates = lean(LeanOptions(skip_zero_gradient=True, skip_old_log_prob=True, metrics=metrics))
    updates._trainer.actor_rollout_wg.log_probs_of_update = lambda rows: asked.append(len(rows))
    assert not passes(updates, batch(16))
    updates.actor(batch(16), {}, lambda rows, metrics: rows)
    assert asked == [8] * asks


def test_passes_that_were_run_all_the_same_are_counted(told, monkeypatch):
    updates = lean(BOTH)
    for rows in (8, 12):
        passes(updates, batch(rows))
    monkeypatch.setattr(STEP, "with_gradient", [True] * 12)
    updates.actor(batch(12), {}, lambda asked, metrics: asked)
    assert updates.metrics["fuse/update_old_log_prob_passes"] == 1.0
    assert updates.metrics["fuse/update_own_log_probs"] == 0.0


def test_shuffled_rows_stay_where_they_are(told):
    updates, seen = lean(BOTH, shuffle=True), []
    passes(updates, batch(8))
    updates.actor(batch(8), {}, lambda asked, metrics: seen.extend(asked.keys))
    assert seen == batch(8).keys


def test_seconds_that_were_saved():
    # Half of the tokens took 2 s: the other half would have, and the pass a third of all four.
    assert saved_seconds(2.0, 0.5, own=False, forwarded=0.0) == pytest.approx(2.0)
    assert saved_seconds(2.0, 0.5, own=True, forwarded=0.0) == pytest.approx(2.0 + 4.0 / 3)
    assert saved_seconds(2.0, 0.0, own=True, forwarded=1.0) == pytest.approx(2.0 / 3)
    assert saved_seconds(2.0, 1.0, own=False, forwarded=0.0) == 0.0, "nothing tells how long it would have taken"


def test_a_pass_is_one_forward_pass_of_several_epochs(told, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "saved_seconds", lambda seconds, skipped, own, forwarded: seen.append(own) or 0.0)
    for epochs in (1, 4):
        updates = lean(BOTH, ppo_epochs=epochs)
        assert not passes(updates, batch(8))
        updates.actor(batch(8), {}, lambda asked, metrics: asked)
    assert seen == [1.0, 0.25]


@pytest.mark.parametrize(
    ("options", "actor", "share"),
    [
        ({}, {}, 0.5),  # of two mini-batches, the second
        ({}, {"ppo_epochs": 2}, 0.75),
        ({}, {"calculate_entropy": True}, 1.0),
        ({"bypass": True}, {}, 1.0),
        ({"metrics": "computed"}, {"calculate_entropy": True}, 0.0),
    ],
)
def test_seconds_of_the_pass_for_metrics_are_not_saved(told, monkeypatch, options, actor, share):
    seen = []
    monkeypatch.setattr(module, "saved_seconds", lambda seconds, skipped, own, forwarded: seen.append(forwarded) or 0.0)
    monkeypatch.setattr(STEP, "with_gradient", told * 2)
    updates = lean(LeanOptions(skip_zero_gradient=True, **options), **actor)
    updates.actor(batch(16), {}, lambda asked, metrics: asked)
    assert seen == [share]


def test_seconds_before_the_stage_are_seconds_of_the_update(told, monkeypatch):
    seen = []
    monkeypatch.setattr(module, "saved_seconds", lambda seconds, *rest: seen.append(seconds) or 0.0)
    updates = lean(BOTH)
    updates.seconds_before = 1000.0
    updates.actor(batch(8), {}, lambda asked, metrics: asked)
    assert seen[0] >= 1000.0


def test_only_advantages_that_are_zero_where_they_count():
    def nested(*rows):
        return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)

    data = {
        "advantages": nested([0.0, 0.0], [0.0, 1e-30], [0.0, -0.0, 3.0], [float("nan")]),
        "response_mask": nested([1.0, 1.0], [1.0, 1.0], [1.0, 1.0, 0.0], [1.0]),
    }
    assert has_gradient(data) == [False, True, False, True]
    assert without_gradient(batch(4, padding=1), [False, True, False, True]) == {
        "zero_gradient_samples": pytest.approx(2 / 3),
        "zero_gradient_tokens": pytest.approx(40 / 60),
    }


@pytest.mark.parametrize(
    ("transformer", "module", "switches"),
    [
        (
            {"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "seq_aux_loss"},
            torch.nn.Linear(1, 1),
            ["skip_zero_gradient"],
        ),
        # As verl sets it, whatever coefficient a bridge finds in the model.
        ({"moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "none"}, torch.nn.Linear(1, 1), []),
        ({"moe_z_loss_coeff": 0.01}, torch.nn.Linear(1, 1), ["skip_zero_gradient"]),
        ({"calculate_per_token_loss": True}, torch.nn.Linear(1, 1), ["skip_zero_gradient"]),
        ({"moe_expert_capacity_factor": 1.0}, torch.nn.Linear(1, 1), ["skip_zero_gradient", "skip_old_log_prob"]),
        (
            {"moe_router_load_balancing_type": "sinkhorn"},
            torch.nn.Linear(1, 1),
            ["skip_zero_gradient", "skip_old_log_prob"],
        ),
        ({"moe_router_load_balancing_type": ["aux_loss"]}, torch.nn.Linear(1, 1), []),
        ({"fp8": "hybrid"}, torch.nn.Linear(1, 1), ["skip_zero_gradient", "skip_old_log_prob"]),
        ({}, torch.nn.Dropout(0.1), ["skip_zero_gradient", "skip_old_log_prob"]),
        ({}, torch.nn.Dropout(0.0), []),
        ({"vision_config": {}}, torch.nn.Linear(1, 1), ["skip_zero_gradient"]),
    ],
)
def test_a_model_with_more_than_advantages_in_its_gradient_is_refused(transformer, module, switches):
    both = SimpleNamespace(**transformer)
    engine = SimpleNamespace(tf_config=both, model_config=SimpleNamespace(hf_config=both), module=[module])
    for switch in ("skip_zero_gradient", "skip_old_log_prob"):
        if switch in switches:
            with pytest.raises(FuseError, match=f"fuse.update.{switch}=true: not with a model that has"):
                check_model(engine, LeanOptions(**{switch: True}))
        else:
            check_model(engine, LeanOptions(**{switch: True}))
