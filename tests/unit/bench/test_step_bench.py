import json
from argparse import ArgumentParser

import pytest

from ci.bench.step import (
    ALL,
    ASYNCHRONOUS,
    CASES,
    FAST,
    STOCK,
    TASKS,
    Size,
    accuracies,
    add_arms,
    add_size,
    described,
    overrides,
    report,
    reward_difference,
    run,
    size_of,
    time_to_reward,
)
from ci.bench.support.picture import draw
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import BASELINE


def step(number: int, seconds: float, score: float = 0.5, lost: int = 0, duplicated: int = 0) -> dict:
    parts = {"gen": 0.6 * seconds, "adv": 0.001 * seconds}
    return {
        "step": number,
        "seconds": seconds,
        "at": number * (seconds + 0.5),
        "parts": parts,
        "samples": 128 - lost,
        "lost": lost,
        "duplicated": duplicated,
        "tokens": 1000,
        "prompt_lengths": [9] * 128,
        "response_lengths": [100 + number, *[7] * 127],
        "cut_off": 1,
        "own": {"fuse/zero_gradient_samples": 0.25},
        "score": score,
        "entropy": 0.2,
        "staleness": 0.5,
        "evicted": 8,
    }


def of_arms(seconds: dict[str, float], **more) -> dict[str, list[dict]]:
    return {arm: [step(number, each, **more) for number in (2, 3, 4)] for arm, each in seconds.items()}


def test_a_rung_adds_one_feature_and_an_ablation_leaves_one_out():
    arms = CASES["grpo"].arms
    first, second, third = CASES["grpo"].features
    assert arms[STOCK] == BASELINE
    assert [arms[name] for name in CASES["grpo"].ladder] == [
        frozenset(),
        {first},
        {first, second},
        {first, second, third},
    ]
    assert arms[f"no-{second}"] == {first, third}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_no_two_runs_have_the_same_features(case):
    features = [case.arms[name] for name in case.runs]
    assert len(set(features)) == len(features)
    assert {case.same(name) for name in case.arms} == set(case.runs)


@pytest.mark.parametrize("name", CASES)
def test_stock_is_verls_trainer_and_other_arms_differ_in_their_features_only(name, tmp_path):
    case = CASES[name]

    def settings(arm: str) -> set[str]:
        return set(overrides(case, arm, tmp_path, tmp_path, Size(3, 1), 0))

    assert "trainer.v1.trainer_mode=sync" in settings(STOCK)
    assert settings(ASYNCHRONOUS) ^ settings(STOCK) == {
        f"trainer.v1.trainer_mode={mode}" for mode in ("sync", "colocate_async")
    }
    assert not any(key.startswith("fuse.") for key in settings(STOCK))
    switched = {key for keys in case.features.values() for key in keys}
    assert settings(ALL) - settings("trainer") == switched
    assert settings("trainer") - settings(STOCK) == {
        f"fuse.observe.{key}=false" for key in ("progress", "perfetto", "html")
    }
    assert settings(FAST) ^ settings("trainer") == {"fuse.preset=fast"}


def test_ratios_are_of_stock_over_ours_and_an_ablation_of_without_over_with():
    seconds = {"stock": 6.0, "trainer": 6.0, "skip_zero_gradient": 5.0, "all": 3.0, "no-skip_zero_gradient": 3.6}
    found = report("grpo", of_arms(seconds), last=2)
    assert found["ratio"] == 2.0
    assert found["interval"] == [2.0, 2.0]
    assert {name: rung["ratio"] for name, rung in found["ladder"].items()} == {
        "trainer": 1.0,
        "skip_zero_gradient": 1.2,
        "all": 2.0,
    }
    assert {name: one["ratio"] for name, one in found["ablation"].items()} == {"skip_zero_gradient": 1.2}
    assert found["shares"]["stock"] == {"gen": 0.6}
    assert (found["samples"], found["lost"], found["duplicated"]) == (15 * 128, 0, 0)


def test_one_step_that_something_disturbed_moves_the_mean_and_not_the_median():
    steps = of_arms({"stock": 4.0, "all": 2.0})
    steps["stock"][1] = step(3, 16.0)
    found = report("grpo", steps, last=1)
    assert found["seconds"]["stock"] == 8.0
    assert found["median_seconds"] == {"stock": 4.0, "all": 2.0}
    assert found["interval"][0] < found["ratio"] < found["interval"][1]


def test_fast_stands_in_where_all_was_not_run():
    found = report("grpo", of_arms({"stock": 6.0, "fast": 3.0}), last=2)
    assert (found["ratio"], found["fast"]["ratio"]) == (2.0, 2.0)
    assert (found["ladder"], found["ablation"]) == ({}, {})
    rung = report("grpo", of_arms({"stock": 6.0, "skip_old_log_prob": 4.0, "fast": 3.0}), last=2)
    assert (list(rung["ladder"]), rung["ablation"]) == (["skip_old_log_prob"], {})
    assert list(found["shares"]) == ["stock", "fast"]


def test_drafts_of_a_step_weigh_as_many_as_they_are_and_what_is_off_is_none():
    stock = [step(2, 4.0), step(3, 4.0)]
    ours = [step(2, 2.0), step(3, 2.0)]
    for each, drafted, acceptance in zip(ours, (100.0, 300.0), (0.5, 0.9), strict=True):
        each["own"] |= {"fuse/speculation_drafted_tokens": drafted, "fuse/speculation_acceptance": acceptance}
    assert described(stock, ours) == {
        "tokens_per_step": 128 * 9 + 127 * 7 + 102.5,
        "prompt_tokens": [9, 9, 9],
        "response_tokens": [7, 7, 7],
        "cut_off": round(1 / 128, 3),
        "acceptance": 0.8,
        "zero_gradient_share": 0.25,
        "shared_prompt_share": None,
        "idle": None,
    }
    ours[0]["own"]["fuse/speculation_drafted_tokens"] = ours[1]["own"]["fuse/speculation_drafted_tokens"] = 0.0
    assert described(stock, ours)["acceptance"] is None


@pytest.mark.parametrize(
    ("given", "steps", "epoch", "prompts", "rounds"),
    [
        ("", 11, 3, 16, 1),
        ("--quick", 11, 3, 16, 2),
        ("--task smollm2 --rounds 3", 11, 20, 4, 3),
        ("--task smollm2 --quick", 3, 20, 4, 1),
        ("--task smollm2 --quick --steps 5", 5, 20, 4, 1),
    ],
)
def test_a_task_has_its_own_size(given, steps, epoch, prompts, rounds, tmp_path):
    arguments = ArgumentParser()
    add_size(arguments)
    arguments.set_defaults(epoch=None, arms=None)
    size, told = size_of(arguments.parse_args(given.split()), arguments)
    assert (size.steps, size.epoch, size.task.prompts, told) == (steps, epoch, prompts, rounds)
    settings = overrides(CASES["common"], STOCK, tmp_path, tmp_path, size, 0)
    for expected in (
        f"data.train_batch_size={prompts}",
        f"data.train_max_samples={prompts * epoch}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts // 4}",
        f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={size.task.tokens}",
    ):
        assert settings.count(expected) == 1, expected


def test_accuracy_is_of_all_unseen_problems_before_the_first_step_and_after_the_last():
    unseen = {"sum": 30, "story": 10}
    metrics = {
        step: {f"val-core/{kind}/acc/mean@1": value for kind, value in zip(unseen, values, strict=True)}
        for step, values in ((0, (0.2, 0.0)), (5, (0.4, 0.8)))
    }
    metrics[3] = {}
    assert accuracies(metrics, unseen) == [0.15, 0.5]
    arms = of_arms({"stock": 4.0, "fast": 2.0})
    assert "validation" not in report("grpo", arms, last=1)
    arms["fast"][-1]["accuracies"] = [0.15, 0.5]
    assert report("grpo", arms, last=1)["validation"] == {"stock": [], "fast": [[0.15, 0.5]]}


def test_quick_takes_no_arms(capsys):
    arguments = ArgumentParser()
    add_size(arguments)
    add_arms(arguments, ["stock", "fast"], "")
    with pytest.raises(SystemExit):
        size_of(arguments.parse_args(["--quick", "--arms", "fast"]), arguments)
    assert "--quick has arms of its own" in capsys.readouterr().err


def test_steps_of_an_earlier_version_of_the_bench_are_named(tmp_path):
    home, settings = tmp_path / "run", ["a=1"]
    home.mkdir()
    (home / "ended").touch()
    (home / "overrides.json").write_text(json.dumps(settings))
    (home / "steps.jsonl").write_text(2 * '{"step": 1, "longest": 5}\n')
    with pytest.raises(SystemExit, match="measured by an earlier version of this bench; name another --keep"):
        run(home, Size(1, 1), CASES["grpo"], settings)


def test_the_published_model_has_the_layers_that_it_has(capsys):
    arguments = ArgumentParser()
    add_size(arguments)
    with pytest.raises(SystemExit):
        size_of(arguments.parse_args(["--task", "smollm2", "--layers", "2"]), arguments)
    assert "--layers 2: the model of --task smollm2 is as published" in capsys.readouterr().err


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("case", CASES)
def test_each_case_has_a_recipe_of_each_task(case, task):
    assert find_recipe(TASKS[task].recipe.format(CASES[case].algorithm)).folder.is_dir()


def test_what_is_lost_or_twice_in_any_arm_counts():
    found = report("grpo", of_arms({"stock": 6.0, "all": 3.0}, lost=1, duplicated=2), last=2)
    assert (found["lost"], found["duplicated"]) == (6, 12)


def test_the_rewards_difference_is_of_the_last_steps():
    stock = [step(number, 1.0, score=0.5) for number in range(2, 12)]
    ours = [step(number, 1.0, score=0.9 if number < 8 else 0.6) for number in range(2, 12)]
    assert reward_difference(stock, ours, last=4) == [0.1, 0.1]
    low, high = reward_difference(stock, ours, last=10)
    assert low < 0.28 < high


def test_the_last_feature_left_out_is_the_last_rung_but_one():
    found = report("ppo", of_arms({"stock": 4.0, "interstage": 3.0, "all": 2.0}), last=1)
    assert found["ablation"]["speculation"]["ratio"] == 1.5


def test_the_ladder_is_drawn_with_the_name_and_ratio_of_each_rung(tmp_path):
    found = report("grpo", of_arms({"stock": 6.0, "trainer": 6.0, "skip_zero_gradient": 5.0, "all": 3.0}), last=2)
    draw([found], tmp_path / "ladder.svg")
    picture = (tmp_path / "ladder.svg").read_text()
    for text in ("grpo", "trainer", "skip_zero_gradient", "all", "1.00", "1.20", "2.00"):
        assert f"<!-- {text} -->" in picture, text
    assert [file.name for file in tmp_path.iterdir()] == ["ladder.svg"]


def rising(seconds: float, to: float, rounds: int = 1) -> list[dict]:
    """A reward that rises from 0 to `to` in 100 steps, in rounds that are half a point above and below the mean."""
    return [
        step(number, seconds, score=to * (number - 2) / 99 + 0.5 * (2 * round_ - rounds + 1) / rounds)
        for round_ in range(rounds)
        for number in range(2, 102)
    ]


def test_the_time_to_a_reward_is_the_time_of_all_steps_until_the_mean_of_five_is_there():
    found = {STOCK: rising(4.0, 0.99, rounds=2), ALL: rising(2.0, 0.99), ASYNCHRONOUS: rising(1.0, 0.5)}
    told = time_to_reward(found, last=5)
    # Stock's first five steps have 0.02 on average, its last five 0.97.
    assert told["reward"] == 0.875
    # The mean over five steps is first above this level in step 91, whose mean is that of steps 87 to 91.
    # 90 times half a second lie between these steps.
    assert told["arms"][STOCK] == {
        "steps": 91,
        "seconds": 409.0,
        "first_reward": 0.02,
        "last_reward": 0.97,
        "staleness": 0.5,
        "evicted": 2 * 100 * 8,
    }
    assert told["arms"][ALL]["seconds"] == 227.0
    assert (told["arms"][ASYNCHRONOUS]["steps"], told["arms"][ASYNCHRONOUS]["seconds"]) == (None, None)


def test_a_reward_that_does_not_rise_is_reached_by_no_arm():
    flat = {arm: rising(1.0, 0.0) for arm in (STOCK, ALL, ASYNCHRONOUS)}
    told = time_to_reward(flat, last=20)
    assert told["reward"] is None
    assert {arm["steps"] for arm in told["arms"].values()} == {None}


def test_a_report_has_the_time_to_a_reward_with_an_asynchronous_arm_only():
    found = {arm: rising(2.0, 0.9) for arm in (STOCK, ALL)}
    assert "time_to_reward" not in report("grpo", found, last=20)
    found[ASYNCHRONOUS] = rising(1.0, 0.9)
    assert report("grpo", found, last=20)["time_to_reward"] == time_to_reward(found, last=20)
