"""Runs shipped recipes through `verl-fuse run`, as a user would, and reads back what they left."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from support.fork_server import SITE

from ci.upstream.ab.runs import RECORDER, SMALL, SMALL_CRITIC
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import LOG, TASKS

__all__ = ["RECORDED", "RECORDING", "SMALL", "SMALL_CRITIC", "Finished", "run"]

SUPPORT = Path(__file__).parent / "support"
# Of the warm start, where answers must be of many lengths; what recipes ask for (800) takes
# minutes and only learns more.
WARM_STEPS = {"euclid": "250"}
# A run whose rollouts are kept, and the experiment name verl files them under: runs with the same
# settings and name replay them.
RECORDING = "recorded"
RECORDED = (
    *SMALL,
    *SMALL_CRITIC,
    "trainer.save_freq=-1",
    "trainer.resume_mode=disable",
    "skip.rollout_tq.enable=true",
    "skip.rollout_tq.steps=[1,2,3,4]",
)


@dataclass(frozen=True)
class Finished:
    """A run that ended: exit code, what it showed on the screen, everything it printed, and its directory."""

    code: int
    screen: str
    output: str
    folder: Path

    @property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Return verl's metrics by step, of which there may be several records."""
        found: dict[int, dict[str, float]] = {}
        for entry in map(json.loads, (self.folder / "metrics.jsonl").read_text().splitlines()):
            found.setdefault(entry["step"], {}).update(entry["data"])
        return found

    def accounts(self) -> dict[int, dict]:
        """The sample accounts, by step."""
        files = sorted((self.folder / "accounts").glob("step_*.json"))
        return {account["step"]: account for account in (json.loads(file.read_text()) for file in files)}


def run(
    home: Path,
    recipe: str,
    *overrides: str,
    name: str,
    experiment: str | None = None,
    baseline: bool = False,
    record: Path | None = None,
    recorder: str = "step_recorder",
    faults: str = "",
    variables: Mapping[str, str] = MappingProxyType({}),
    folders: Sequence[Path] = (),
    forks: Mapping[str, str] = MappingProxyType({}),
    stop_when: Callable[[Path], bool] | None = None,
    timeout: float = 1200,
) -> Finished:
    """Run a recipe in `home/name`, as experiment `experiment` (default: `name`).

    `record` saves every step's numbers there (ci/upstream/recorder, or the module `recorder` in support/), with
    `faults` planted (support/streaming_faults.py), with environment `variables` and with modules of `folders`. With the
    variables of the fixture `forks` the processes of the run are forks. `stop_when(folder)` is polled, and once it is
    true the run is told to stop (SIGTERM).
    """
    folder = home / name
    log = home / f"{name}.{time.time_ns()}.log"
    environment = {**os.environ, **forks, "VERL_FUSE_HOME": str(home)}
    if forks:
        environment["PYTHONPATH"] = os.pathsep.join([str(SITE), os.environ.get("PYTHONPATH", "")])
    if record is not None:
        environment |= {
            "VERL_USE_EXTERNAL_MODULES": f"{recorder},streaming_faults" if faults else recorder,
            "PYTHONPATH": os.pathsep.join(
                [str(RECORDER), str(SUPPORT), *map(str, folders), environment.get("PYTHONPATH", "")]
            ),
            "STEP_RECORD_DIR": str(record),
            "STREAMING_FAULTS": faults,
            **variables,
        }
    make_task(home, recipe)
    command = [str(Path(sys.executable).with_name("verl-fuse")), "run", recipe, *(["--baseline"] if baseline else [])]
    command += [
        *overrides,
        "recipe.prepare=null",
        f"trainer.experiment_name={experiment or name}",
        f"trainer.default_local_dir={folder}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, cwd=home
        )
        try:
            _wait(process, folder, stop_when, timeout)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                process.wait(60)
    screen, printed = log.read_text(errors="replace"), folder / LOG
    # Empty where the run was refused; what an earlier run in this folder printed has then not moved away.
    own = printed.read_text(errors="replace") if str(printed) in screen else ""
    return Finished(process.returncode, screen, f"{own}\n{screen}", folder)


def make_task(home: Path, recipe: str) -> None:
    """Make the recipe's task in `home`, with a shorter warm start than `verl-fuse run` would give it."""
    kind = find_recipe(recipe).prepare
    assert kind is not None
    out = home / "tasks" / kind
    out.parent.mkdir(exist_ok=True)
    with out.with_suffix(".lock").open("w") as lock:
        # Another of pytest's workers may be about to make it.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not out.exists():
            steps = WARM_STEPS.get(kind, "25")
            subprocess.run([sys.executable, "-m", *TASKS[kind], "--steps", steps, "--out", str(out)], check=True)


def _wait(process: subprocess.Popen, folder: Path, stop_when: Callable[[Path], bool] | None, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{process.args} did not end in {timeout} s")
        if stop_when is not None and stop_when(folder):
            process.send_signal(signal.SIGTERM)
            process.wait(120)
            return
        time.sleep(0.2)
