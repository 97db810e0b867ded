"""The invariants in the docstrings of ci/gpu/{machine,kernels}.py, and the parts that run without a GPU, in
sizes that measure nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from ci.gpu import kernels  # noqa: E402
from ci.gpu.__main__ import FAILED, MOST_SECONDS, PARTS, REFUSED, main  # noqa: E402
from ci.gpu.machine import Report, require_packages  # noqa: E402
from ci.gpu.parts import runs, slices, speculation  # noqa: E402
from ci.gpu.programs import different_ranks  # noqa: E402
from verl_fuse.cost.profiled import ProfiledCost  # noqa: E402
from verl_fuse.cost.table import ProfileTable  # noqa: E402
from verl_fuse.errors import FuseError  # noqa: E402
from verl_fuse.spec.cluster import Cluster  # noqa: E402

REPO = Path(__file__).resolve().parents[3]
RESULTS = sorted((REPO / "ci/gpu/results").glob("*/*.json"))


def tiny(part: str, out: Path) -> Report:
    """Run the part in a process of its own, in a user's way."""
    command = [sys.executable, "-m", "ci.gpu", part, "--device", "cpu", "--tiny", "--out", str(out)]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return Report.read(out)


def test_a_profile_is_one_that_the_cost_model_reads(tmp_path: Path):
    report = tiny("profile", tmp_path / "profile.json")
    table = ProfileTable.read(tmp_path / report.result["profile"])
    cost = ProfiledCost.of(table, Cluster(1, 2, table.device, 1e9, 1e9, 1e9))
    assert [each.model.name for each in table.models] == ["tiny"]
    assert cost.table is table


def test_decoding_beside_training_is_timed_in_both_ways(tmp_path: Path):
    report = tiny("beside", tmp_path / "beside.json")
    (times,) = report.result["sequences"].values()
    assert set(times) == {
        f"{which} {how}" for which in ("decode", "train") for how in ("alone", "beside", "slower")
    } | {"gain"}
    assert times["gain"] == pytest.approx(1 / times["decode slower"] + 1 / times["train slower"])


def test_programs_and_transfers_are_bitwise_right_on_one_device(tmp_path: Path):
    result = tiny("executor", tmp_path / "executor.json").result
    assert result["faults"] == []
    assert [len(result[name]) for name in ("one rank, gloo", "two ranks, gloo")] == [1, 2]
    assert all(rank["program"]["bitwise"] for name in result if name != "faults" for rank in result[name])
    assert all(rank["fsdp 2 to vllm tp2"]["received bytes"] > 0 for rank in result["two ranks, gloo"])


def test_ranks_that_differ_are_named():
    right = {"program": {"bitwise": True}, "a to b": {"wrong": []}}
    wrong = {"program": {"bitwise": False}, "a to b": {"wrong": ["weight"]}}
    assert different_ranks([right, right]) == []
    assert different_ranks([right, wrong]) == [f"{name}, rank 1: not bitwise equal" for name in wrong]


def test_the_samplers_kernels_are_those_that_were_read_and_sample_what_they_should(tmp_path: Path):
    pytest.importorskip("triton")
    pytest.importorskip("vllm")
    result = tiny("speculation", tmp_path / "speculation.json").result
    assert result["faults"] == []
    assert set(result["kernels"]) - set(kernels.DISPATCHERS) == set(kernels.READ)
    assert result["run as"] == "Triton's interpreter"
    assert max(result["control"].values()) > speculation.FURTHEST > result["furthest"]


def test_a_kernel_that_changed_is_named():
    text = "def expand_kernel(a):\n    return a\n"
    assert kernels.unread(kernels.fingerprints_of(text)).keys() == set(kernels.READ)
    assert kernels.unread(
        dict.fromkeys(kernels.READ, "?") | {"expand_kernel": kernels.READ["expand_kernel"][0]}
    ).keys() == set(kernels.READ) - {"expand_kernel"}


def test_a_dispatcher_may_be_missing_and_is_named_where_it_changed():
    known = {name: texts[0] for name, texts in kernels.READ.items()}
    assert kernels.unread(known) == {}
    assert kernels.unread(known | {"_expand": "?"}) == {"_expand": "?"}


def test_a_wrong_distribution_is_far_and_a_right_one_near():
    torch.manual_seed(0)
    wanted = torch.randn(speculation.WORDS).softmax(0)
    right = torch.multinomial(wanted, 20_000, replacement=True)
    wrong = torch.multinomial((wanted**0.8) / (wanted**0.8).sum(), 20_000, replacement=True)
    assert abs(speculation.chi_square(right, wanted)) < speculation.FURTHEST < speculation.chi_square(wrong, wanted)


def test_a_slice_that_keeps_memory_of_a_device_is_a_fault():
    found = {"before": {"now": 0}, "after a step": {"now": slices.MOST_LEFT + 1}}
    assert slices.faults(found, "cpu") == []
    assert ["keeps" in fault for fault in slices.faults(found, "cuda")] == [True]


def test_runs_that_lose_a_sample_or_drift_are_faults():
    step = {"trained": 64, "missing": 0, "gap": 1e-3}
    found = {name: {"steps": {1: dict(step)}} for name in ("observed", "everything")}
    assert runs.faults(found) == []
    found["everything"]["steps"][1]["trained"] = 63
    found["everything"]["steps"][1]["gap"] = 1e-2
    assert ["step 1" in fault for fault in runs.faults(found)] == [True, False]


def test_the_slices_of_a_gpu_are_composed_without_the_recipes_platform():
    pytest.importorskip("hydra")
    from omegaconf import OmegaConf

    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe

    config = compose(find_recipe("ppo-cpu"), slices.ON_GPU)
    OmegaConf.resolve(config)
    assert (config.trainer.device, config.actor_rollout_ref.actor.strategy, config.critic.strategy) == (
        "cuda",
        "fsdp2",
        "fsdp2",
    )


@pytest.mark.parametrize("devices", [1, 2])
def test_the_runs_on_a_gpu_are_accepted(devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A configuration refused on a GPU would be refused here: everything but the device is the same."""
    pytest.importorskip("verl")
    from verl_fuse.cli.composition import compose
    from verl_fuse.cli.recipes import find_recipe
    from verl_fuse.host.start.settings import load_settings

    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    monkeypatch.setenv("VERL_FUSE_HOME", str(tmp_path))
    config = compose(find_recipe(runs.RECIPE), runs.overrides("cuda", devices, everything=True))
    assert config.trainer.device == "cuda"
    settings = load_settings(config)
    assert settings.blocks["realloc"].weight_sync == "shards"


def test_a_missing_package_is_named():
    with pytest.raises(FuseError, match="needs no-such-thing or nor-this, not installed here"):
        require_packages("torch", "no-such-thing|torch", "no-such-thing|nor-this")


@pytest.mark.parametrize("part", PARTS)
def test_without_a_gpu_a_part_is_refused_and_leaves_no_report(part: str, tmp_path: Path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one here")
    assert main([part, "--out", str(tmp_path / "report.json")]) == REFUSED
    assert "torch sees no CUDA device" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_fault_is_an_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ci.gpu.parts.profile.run", lambda device, out, *, tiny: {"faults": ["one"]})
    assert main(["profile", "--device", "cpu", "--out", str(tmp_path / "report.json")]) == FAILED
    assert Report.read(tmp_path / "report.json").result == {"faults": ["one"]}


def test_a_report_is_read_as_it_was_written_and_others_are_refused(tmp_path: Path):
    report = Report.of("profile", "cpu", 1.23, {"flops": 1.0})
    report.write(tmp_path / "report.json")
    assert Report.read(tmp_path / "report.json") == report
    assert report.versions["torch"] == torch.__version__
    (tmp_path / "other.json").write_text(json.dumps({"part": "profile"}))
    with pytest.raises(FuseError, match=r"other\.json: report: missing date"):
        Report.read(tmp_path / "other.json")


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_results_in_the_repository_are_read(path: Path):
    if path.name.endswith(".profile.json"):
        assert ProfileTable.read(path).models
        return
    report = Report.read(path)
    assert path.parent.name == f"{report.date}-{report.kind}"
    assert report.result.get("faults", []) == []
    assert report.part not in PARTS or report.kind == "cpu" or report.seconds < MOST_SECONDS


def test_there_are_results_of_every_part_that_needs_no_gpu():
    assert {path.stem for path in RESULTS} >= {*PARTS, "profile.profile", "devices-2", "devices-8"}
    assert os.path.getsize(RESULTS[0]) < 200_000
