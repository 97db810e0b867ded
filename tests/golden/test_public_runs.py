"""What `fuse.preset=fast` does for launch scripts that people published: public_runs.json has the arguments that any
feature reads, of the synchronous runs and of the others. The counts say whom verl-fuse reaches; they go up with what it
serves, and a count that goes down is a feature that has left somebody."""

import json
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path
from statistics import quantiles

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.composition import apply
from verl_fuse.cli.launch import read_run
from verl_fuse.cli.replay import mini_batches_of
from verl_fuse.host.start.preset import Choice
from verl_fuse.host.start.settings import foreseen
from verl_fuse.simulate.shared_prompts import copies_left
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import ROLLOUT, getter

pytest.importorskip("hydra")
RUNS = json.loads(Path(__file__).with_name("public_runs.json").read_text())
SYNCHRONOUS_RUNS = [number for number, run in enumerate(RUNS) if run["synchronous"]]
# Of the synchronous runs: how many have each feature on, any update feature, and nothing.
SYNCHRONOUS, ANY_UPDATE, NOTHING = 178, 154, 11
ON = {
    "update.response_logits": 131,
    "update.balance": 128,
    "update.share_prompts": 83,
    "elastic.enabled": 113,
    "interstage.enabled": 87,
    "update.skip_zero_gradient": 54,
    "update.skip_old_log_prob": 71,
    "update.skip_values": 2,
    "pipeline.enabled": 1,
}
# Where prompts are computed once: quartiles of the share of tokens that need not be computed.
SAVED_IN_UPDATES, SAVED_IN_PASSES = [0.19, 0.27, 0.4], [0.4, 0.44, 0.44]


@cache
def base(engine: str) -> DictConfig:
    """Verl's own configuration for an engine, as `check` composes it."""
    config = read_run([f"model_engine={engine}"], None).config
    OmegaConf.set_struct(config, False)
    config.trainer.v1.trainer_mode = "fuse"
    config.fuse.preset = "fast"
    OmegaConf.set_struct(config, True)
    return config


@cache
def foreseen_of(number: int) -> tuple[DictConfig, tuple[Choice, ...]]:
    """The configuration of a run, and what the preset does for it."""
    arguments = RUNS[number]["arguments"]
    engines = [argument.partition("=")[2] for argument in arguments if key_of(argument) == "model_engine"]
    config = deepcopy(base(engines[0] if engines else "dp"))
    unknown, faulty = apply(config, [argument for argument in arguments if key_of(argument) != "model_engine"])
    assert (unknown, faulty) == ((), {})
    OmegaConf.set_struct(config, False)
    return config, foreseen(config, "fast")


def on(number: int) -> list[str]:
    return [choice.feature.switch for choice in foreseen_of(number)[1] if not choice.reasons]


def test_each_feature_is_on_for_as_many_public_runs_as_before():
    found = [on(number) for number in SYNCHRONOUS_RUNS]
    counts = Counter(switch for on in found for switch in on)
    updates = sum(any(switch.startswith("update.") for switch in on) for on in found)
    assert (len(found), dict(counts), updates, found.count([])) == (SYNCHRONOUS, ON, ANY_UPDATE, NOTHING)


def test_what_is_left_to_share_where_prompts_and_responses_are_as_long_as_their_limits():
    found = []
    for get in (getter(foreseen_of(number)[0]) for number in SYNCHRONOUS_RUNS if "update.share_prompts" in on(number)):
        prompt, response = get("data.max_prompt_length"), get("data.max_response_length")
        share, samples = prompt / (prompt + response), get(f"{ROLLOUT}.n")
        numbers = mini_batches_of(get)["actor"], 1
        found.append([share * (1 - copies_left(samples, number)) for number in numbers])
    quartiles = [[round(value, 2) for value in quantiles(shares)] for shares in zip(*found, strict=True)]
    assert quartiles == [SAVED_IN_UPDATES, SAVED_IN_PASSES]


def test_the_table_says_where_its_runs_are_from():
    assert len(RUNS) > 150
    assert all(run["repository"].count("/") == 1 and run["file"] for run in RUNS)
    assert all(len(run["commit"]) == 40 for run in RUNS)
    assert len({(run["repository"], run["file"]) for run in RUNS}) == len(RUNS)
