"""Refusals, settings and counts of the plugin `speculation`."""

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from verl_fuse.spec.events import SetUp, StageBegun, StepBegun
from verl_fuse.spec.timeline import REQUEST, Span, Timeline
from verl_fuse_speculation.config import SpeculationConfig
from verl_fuse_speculation.passes import PASSES_SUFFIX, ForwardPass, append
from verl_fuse_speculation.plugin import SpeculationPlugin
from verl_fuse_speculation.shelf import Shelf

PLUGIN = SpeculationPlugin()
ROLLOUT = {
    "name": "vllm",
    "engine_kwargs": {"vllm": {}},
    "pipeline_model_parallel_size": 1,
    "full_determinism": False,
    "enable_rollout_routing_replay": False,
    "disaggregation": {"enabled": False},
    "checkpoint_engine": {"backend": "naive"},
}


def composed(**changes):
    config = OmegaConf.create(
        {
            "trainer": {"v1": {"trainer_mode": "fuse"}, "device": "cpu"},
            "actor_rollout_ref": {"rollout": ROLLOUT, "model": {"mtp": {"enable": False, "enable_rollout": False}}},
            "fuse": {"speculation": {"enabled": True, "tokens": 4, "epochs": 1, "history_megabytes": 8}},
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


def refused(**changes) -> list[str]:
    return [refusal.key for refusal in PLUGIN.fuse_validate(config=composed(**changes))]


def test_what_fits_is_not_refused_and_off_asks_and_sets_nothing():
    assert refused() == []
    off = composed(fuse__speculation__enabled=False, actor_rollout_ref__rollout__name="sglang")
    assert PLUGIN.fuse_validate(config=off) == []
    assert PLUGIN.fuse_overrides(config=off, run_dir=Path("/runs")) == {}
    assert PLUGIN.fuse_contracts(config=off) == ()
    assert len(PLUGIN.fuse_contracts(config=composed())) == len(PLUGIN.fuse_contracts(config=None)) > 0


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.v1.trainer_mode", "sync"),
        ("actor_rollout_ref.rollout.name", "sglang"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.speculative_config", {"method": "ngram"}),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.logits_processors", ["a.B"]),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.scheduler_cls", "a.B"),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config", '{"a": 1}'),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.return_sampling_mask", True),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.async_scheduling", True),
        ("actor_rollout_ref.rollout.engine_kwargs.vllm.pipeline_parallel_size", 2),
        ("actor_rollout_ref.rollout.pipeline_model_parallel_size", 2),
        ("actor_rollout_ref.rollout.repetition_penalty", 1.1),
        ("actor_rollout_ref.rollout.full_determinism", True),
        ("actor_rollout_ref.rollout.enable_rollout_routing_replay", True),
        ("actor_rollout_ref.rollout.disaggregation.enabled", True),
        ("actor_rollout_ref.rollout.checkpoint_engine.backend", "delta_sharded"),
        ("actor_rollout_ref.model.mtp.enable_rollout", True),
    ],
)
def test_what_does_not_fit_is_refused_by_its_key(key, value):
    assert refused(**{key.replace(".", "__"): value}) == [key]


def test_engines_are_told_what_to_draft_with():
    found = PLUGIN.fuse_overrides(config=composed(), run_dir=Path("/runs/a"))
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert found == {
        f"{engine}.speculative_config.method": "custom_class",
        f"{engine}.speculative_config.model": "verl_fuse_speculation.proposer.HistoryProposer",
        f"{engine}.speculative_config.num_speculative_tokens": 4,
        f"{engine}.speculative_config.draft_load_config": {"download_dir": "/runs/a/speculation"},
        f"{engine}.additional_config.verl_fuse_speculation": {"auto": False, "history_bytes": 8 << 20, "epochs": 1},
        f"{engine}.scheduler_cls": "verl_fuse_speculation.scheduler.TokenwiseScheduler",
    }


@pytest.mark.parametrize(
    ("changes", "graphs"),
    [
        ({}, "FULL"),
        ({"trainer.device": "cpu"}, None),
        ({"engine.decode_context_parallel_size": 2}, None),
        ({"engine.decode_context_parallel_size": 1}, "FULL"),
        ({"engine.compilation_config": {"cudagraph_mode": "PIECEWISE"}}, None),
        ({"engine.compilation_config": {"cudagraph_capture_sizes": [1, 2]}}, "FULL"),
        ({"engine.compilation_config": '{"level": 3}'}, None),
    ],
)
def test_passes_with_drafts_have_full_graphs_where_vllm_has_them_and_the_user_chose_none(changes, graphs):
    engine = "actor_rollout_ref.rollout.engine_kwargs.vllm"
    keys = {key.replace("engine.", f"{engine}.").replace(".", "__"): value for key, value in changes.items()}
    config = composed(**{"trainer__device": "cuda", **keys})
    found = PLUGIN.fuse_overrides(config=config, run_dir=Path("/runs/a"))
    assert found.get(f"{engine}.compilation_config.cudagraph_mode") == graphs


def test_the_run_directory_is_no_part_of_what_vllm_hashes():
    found = [PLUGIN.fuse_overrides(config=composed(), run_dir=Path(folder)) for folder in ("/runs/a", "/runs/b")]
    hashed = [{key: value for key, value in one.items() if ".speculative_config." not in key} for one in found]
    assert hashed[0] == hashed[1]


class Run:
    """The methods of a trainer that the plugin calls."""

    def block(self, plugin: str) -> SpeculationConfig:
        return SpeculationConfig(enabled=True)


def test_drafters_learn_the_step_and_the_step_what_they_did(tmp_path):
    plugin, folder = SpeculationPlugin(), tmp_path / "speculation"
    folder.mkdir()
    append(folder / f"a{PASSES_SUFFIX}", [ForwardPass(0.0, 7, 9, 9, 9, 0.0)])
    plugin.fuse_setup(trainer=Run())
    plugin.fuse_event(SetUp(0, 0.0, tmp_path, None, 2, 4, 2))
    plugin.fuse_event(StepBegun(7, 1.0))
    assert Shelf(folder, 1 << 20, 9, 9).step() == 7
    append(folder / f"a{PASSES_SUFFIX}", [ForwardPass(1.0, 7, 4, 8, 8, 0.1), ForwardPass(2.0, 7, 1, 3, 4, 0.4)])
    append(folder / f"b{PASSES_SUFFIX}", [ForwardPass(1.0, 7, 2, 2, 0, 0.1), ForwardPass(1.0, 6, 5, 5, 5, 0.1)])
    # A validation follows the step's weight sync.
    plugin.fuse_event(StageBegun(7, 2.5, "update_actor"))
    plugin.fuse_event(StageBegun(7, 3.0, "update_weights"))
    append(folder / f"a{PASSES_SUFFIX}", [ForwardPass(4.0, 7, 6, 6, 6, 0.1)])
    found = plugin.fuse_metrics(timeline=Timeline("run", 7, 0.0, 1.0, ()))
    assert found["fuse/speculation_passes"] == 3
    # 13 tokens of 7 rows; 6 of 12 drafted tokens; 1 + 2 + 0 passes more without them.
    assert found["fuse/speculation_tokens_per_pass"] == pytest.approx(13 / 7)
    assert found["fuse/speculation_acceptance"] == pytest.approx(6 / 12)
    assert found["fuse/speculation_passes_saved"] == pytest.approx(3)
    assert found["fuse/speculation_tail_passes"] == 1
    assert found["fuse/speculation_least_chance"] == pytest.approx(0.2)
    assert found["fuse/speculation_tail_least_chance"] == pytest.approx(0.4)
    assert found["fuse/speculation_tail_tokens_per_pass"] == pytest.approx(3)
    assert plugin.fuse_metrics(timeline=Timeline("run", 8, 0.0, 1.0, ())) == {}
    plugin.fuse_event(StepBegun(8, 5.0))
    append(folder / f"a{PASSES_SUFFIX}", [ForwardPass(6.0, 8, 6, 6, 6, 0.1)])
    assert plugin.fuse_metrics(timeline=Timeline("run", 8, 0.0, 1.0, ()))["fuse/speculation_passes"] == 1


def test_a_folder_that_nodes_do_not_share_is_noticed_a_step_later(tmp_path, caplog):
    plugin, folder = SpeculationPlugin(), tmp_path / "speculation"
    folder.mkdir()
    plugin.fuse_setup(trainer=Run())
    plugin.fuse_event(SetUp(0, 0.0, tmp_path, None, 4, 4, 2))
    spans = [Span(REQUEST, f"replica {rank}", "generate", 0.0, 1.0, {"response_tokens": 3}) for rank in range(3)]
    spans.append(Span(REQUEST, "replica 9", "generate", 0.0, 1.0, {"response_tokens": 0}))
    for step in (1, 2, 3):
        append(folder / f"a{PASSES_SUFFIX}", [ForwardPass(1.0, step, 1, 1, 0, 0.0)])
        append(folder / f"b{PASSES_SUFFIX}", [ForwardPass(1.0, 0, 1, 1, 0, 0.0)])
        plugin.fuse_metrics(timeline=Timeline("run", step, 0.0, 1.0, tuple(spans)))
        assert caplog.text.count(f"of 3 replicas that generated, 1 left nothing in {folder}") == (step > 1)


def test_a_run_without_speculation_counts_nothing(tmp_path):
    plugin = SpeculationPlugin()
    plugin.fuse_event(SetUp(0, 0.0, tmp_path, None, 2, 4, 2))
    assert plugin.fuse_metrics(timeline=Timeline("run", 1, 0.0, 1.0, ())) == {}
    assert np.size(list(tmp_path.iterdir())) == 0
