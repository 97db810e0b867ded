"""verl-fuse on versions of verl that it was not written for: the check names the faults, and no run starts.
Needs the package index."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ci.upstream.fetch import fetch
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.source import SourceTree

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

REASONS = {
    "0.9.0": (
        "there is no module verl.workers.rollout.router",
        "vLLMHttpServer.abort_all_requests: parameter reject_request is gone",
        "PPOTrainerSync has no prepare_step",
    ),
    "0.8.0": (
        "there is no module verl.trainer.ppo.v1.trainer_sync",
        "there is no module verl.workers.rollout.router",
        "verl.trainer.main_ppo has no TaskRunnerV1",
    ),
}


@pytest.fixture(scope="module", params=REASONS)
def release(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """(version, folder with its unpacked wheel)."""
    return request.param, fetch("verl", request.param, tmp_path_factory.mktemp("release"))[0]


def python(*arguments: str, before: Path | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run Python with a folder of packages before all others, as if installed there."""
    path = os.pathsep.join(filter(None, (str(before or ""), os.environ.get("PYTHONPATH", ""))))
    env = {**os.environ, "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )


def main_ppo(before: Path, *overrides: str) -> subprocess.CompletedProcess:
    return python(
        "-m", "verl.trainer.main_ppo", "+fuse=default", *overrides, f"hydra.run.dir={before}/run", before=before
    )


def test_the_check_is_red_for_the_right_reasons(release: tuple[str, Path], repo: Path):
    version, folder = release
    done = python("-m", "ci.upstream", "check", "--path", str(folder), before=repo)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith(f"# verl-fuse on verl {version}: red\n")
    for reason in REASONS[version]:
        assert reason.rpartition(": ")[2] in done.stdout


def test_training_is_refused_with_that_list(release: tuple[str, Path]):
    version, folder = release
    done = main_ppo(folder, "++trainer.v1.trainer_mode=fuse")
    assert done.returncode == 2, done.stderr[-3000:]
    message = done.stderr[
        done.stderr.index(f"verl-fuse: verl {version} is not supported: verl-fuse needs verl >=0.9.1") :
    ]
    for reason in REASONS[version]:
        assert reason in message
    assert "Traceback" not in done.stderr


def test_the_check_fetches_a_version_by_itself(repo: Path):
    done = python("-m", "ci.upstream", "check", "--verl", "0.9.0", before=repo)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("# verl-fuse on verl 0.9.0: red\n")


def test_the_check_fetches_a_vllm_by_itself(repo: Path):
    # The last version before the rejection sampler has a module of its own.
    done = python("-m", "ci.upstream", "check", "--vllm", "0.8.0", before=repo)
    assert done.returncode == 2, done.stderr
    assert done.stdout.startswith("# verl-fuse on verl 0.9.1 and vLLM 0.8.0: red\n")
    assert ", vllm 0.8.0, " in done.stdout
    assert "vllm.v1.engine.core_client:BackgroundResources has no engine_manager" in done.stdout


def test_a_version_that_is_not_there_is_an_error_of_its_own(tmp_path: Path):
    with pytest.raises(FuseError, match=r"pip could not download verl==0\.0\.7: "):
        fetch("verl", "0.0.7", tmp_path)


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A folder whose verl calls itself 0.9.1 but has renamed a function we import."""
    shutil.copytree(
        SourceTree.installed("verl").roots["verl"], tmp_path / "verl", ignore=shutil.ignore_patterns("__pycache__")
    )
    for file in (tmp_path / "verl").rglob("*.py"):
        if "agg_loss" in file.read_text():
            file.write_text(file.read_text().replace("agg_loss", "aggregate_loss"))
    return tmp_path


def test_a_broken_contract_refuses_a_version_in_range(changed: Path):
    # verl's own defaults lack micro-batch sizes.
    done = main_ppo(changed, "trainer.v1.trainer_mode=fuse", "actor_rollout_ref.actor.use_dynamic_bsz=true")
    assert done.returncode == 2, done.stderr[-3000:]
    assert (
        "verl-fuse: what is installed (verl 0.9.1, TransferQueue 0.1.11) is not what verl-fuse was written for"
        in done.stderr
    )
    assert "\n  - verl.trainer.ppo.core_algos has no agg_loss\n" in done.stderr + "\n"


def test_doctor_names_a_broken_contract(changed: Path):
    program = "from verl_fuse.cli import main; main()"
    done = python("-c", program, "doctor", "--no-ray", "--json", before=changed)
    assert done.returncode == 1, done.stderr[-3000:]
    found = [finding for finding in json.loads(done.stdout)["findings"] if finding["check"] == "contracts"]
    assert {"state": "fault", "detail": "verl.trainer.ppo.core_algos has no agg_loss"}.items() <= found[0].items()
    assert found[-1]["state"] == "ok"


def test_stock_modes_go_on_where_a_contract_is_broken(changed: Path):
    program = "from verl.trainer.ppo.v1.trainer_base import TRAINER_REGISTRY; print(sorted(TRAINER_REGISTRY))"
    done = python("-c", program, before=changed)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "['colocate_async', 'separate_async', 'sync']"
    assert "verl-fuse: trainer mode 'fuse' is not available: cannot import name 'agg_loss'" in done.stderr
