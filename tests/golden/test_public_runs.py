"""What `fuse.preset=fast` does for launch scripts that people published: public_runs.json has the arguments that any
feature reads, of the synchronous runs and of the others. The counts say whom verl-fuse reaches; they go up with what it
serves, and a count that goes down is a feature that has left somebody."""

import json
from collections import Counter
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.composition import apply, key_of
from verl_fuse.cli.launch import read_run
from verl_fuse.host.start.preset import Choice
from verl_fuse.host.start.settings import foreseen

pytest.importorskip("hydra")
RUNS = json.loads(Path(__file__).with_name("public_runs.json").read_text())
# Of the synchronous runs: how many have each feature on, any update feature, and nothing.
SYNCHRONOUS, ANY_UPDATE, NOTHING = 178, 154, 11
ON = {
    "update.response_logits": 131,
    "update.balance": 128,
    "update.share_prompts": 83,
    "elastic.enabled": 113,
    "interstage.enabled": 87,
    "update.skip_zero_gradient": 69,
    "update.skip_old_log_prob": 71,
    "update.skip_values": 2,
    "pipeline.enabled": 1,
}


@cache
def base(engine: str) -> DictConfig:
    """Verl's own configuration for an engine, as `check` composes it."""
    config = read_run([f"model_engine={engine}"], None).config
    OmegaConf.set_struct(config, False)
    config.trainer.v1.trainer_mode = "fuse"
    config.fuse.preset = "fast"
    OmegaConf.set_struct(config, True)
    return config


def choices(arguments: list[str]) -> tuple[Choice, ...]:
    engines = [argument.partition("=")[2] for argument in arguments if key_of(argument) == "model_engine"]
    config = deepcopy(base(engines[0] if engines else "dp"))
    unknown, faulty = apply(config, [argument for argument in arguments if key_of(argument) != "model_engine"])
    assert (unknown, faulty) == ((), {})
    OmegaConf.set_struct(config, False)
    return foreseen(config, "fast")


def test_each_feature_is_on_for_as_many_public_runs_as_before():
    runs = [run for run in RUNS if run["synchronous"]]
    found = [[choice.feature.switch for choice in choices(run["arguments"]) if not choice.reasons] for run in runs]
    counts = Counter(switch for on in found for switch in on)
    updates = sum(any(switch.startswith("update.") for switch in on) for on in found)
    assert (len(runs), dict(counts), updates, found.count([])) == (SYNCHRONOUS, ON, ANY_UPDATE, NOTHING)


def test_the_table_says_where_its_runs_are_from():
    assert len(RUNS) > 150
    assert all(run["repository"].count("/") == 1 and run["file"] for run in RUNS)
    assert all(len(run["commit"]) == 40 for run in RUNS)
    assert len({(run["repository"], run["file"]) for run in RUNS}) == len(RUNS)
