"""Make runs of GRPO and PPO with everything on, one after the other; a fault ends each run and the next run resumes.

A leg is the same command again, which goes on from the newest checkpoint; after some steps, at a random moment of a
step, a fault comes: an engine or a training rank is killed (SIGKILL), an engine stands still for seconds (SIGSTOP,
SIGCONT) and the run is then told to stop, the run is told to stop (SIGTERM), or the disk is full. The first leg of a
case runs longer, and is told to stop: the growth of memory and open files of each kind of process is read off this leg.

These are wrong: a step whose account is not whole; a prompt trained in two steps of an epoch; an ending that is not the
fault's; a leg that hangs; a process, or shared memory, that outlives its leg; rows that a step leaves in TransferQueue;
a file of the run that cannot be read. The disk is a tmpfs, which needs root; without root that fault is left out, and
the JSON line reports that.

    python -m ci.bench.soak [--minutes 20] [--seed 0] [--case grpo] [--faults engine rank] [--keep DIRECTORY]
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ci.bench.support.processes import handles, kind, processes, resident_mb
from ci.bench.support.runs import ARMS_FOLDER, in_folder, parser

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "integration"))
from verl_runs import SMALL, SMALL_CRITIC, Finished, run

HOME_VARIABLE = "VERL_FUSE_HOME"
PROMPTS, PER_PROMPT = 8, 4
SAMPLES = PROMPTS * PER_PROMPT
# Steps of the leg that memory is read off, and the first steps of that leg, which load and fill caches.
STEADY, WARM = 30, 8
# Steps before a fault, seconds into the next step, seconds for which an engine stands still, and seconds after which a
# leg counts as hung.
BEFORE, WITHIN, STANDS, HANGS = (2, 3, 4), 2.0, 5.0, 900.0
# The disk that gets full has so many megabytes.
DISK_MB = 2048
SHARED_MEMORY = Path("/dev/shm")
STEADILY = "steady"
ENGINE, RANK = "VLLM::EngineCor", "ray::WorkerDict"
STOPPED = 128 + signal.SIGTERM

COMMON = (
    *SMALL,
    f"data.train_batch_size={PROMPTS}",
    "fuse.speculation.enabled=true",
    "fuse.elastic.enabled=true",
    "fuse.realloc.weight_sync=shards",
    "fuse.observe.perfetto=false",
    "trainer.total_training_steps=100000",
    "trainer.total_epochs=1000",
    "trainer.save_freq=2",
    "trainer.max_actor_ckpt_to_keep=1",
    "trainer.max_critic_ckpt_to_keep=1",
    "trainer.resume_mode=auto",
)
# All features that go together, by algorithm.
CASES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "grpo": (
        "grpo-cpu",
        (
            *COMMON,
            f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
            "actor_rollout_ref.actor.use_kl_loss=false",
            "fuse.update.skip_zero_gradient=true",
            "fuse.update.skip_old_log_prob=true",
            "fuse.update.metrics=computed",
        ),
    ),
    "ppo": (
        "ppo-cpu",
        (
            *COMMON,
            *SMALL_CRITIC,
            "fuse.interstage.enabled=true",
            "fuse.interstage.layout=slices",
            f"fuse.interstage.migration_threshold={SAMPLES // 3}",
        ),
    ),
}


@dataclass
class Leg:
    """One run of the command: the fault and the step before the fault, the run's end, and all faults found."""

    case: str
    fault: str
    after: int = 0
    code: int | None = None
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)


Sizes = dict[int, dict[str, tuple[float, int]]]
"""Megabytes and open files of the largest process, by step and kind of process."""


class Fault:
    """Watch a leg's folder, and cause the leg's fault once `steps` steps of the leg are trained. The runner calls the
    object as `stop_when`."""

    def __init__(self, home: Path, leg: Leg, steps: int, rng: random.Random):
        self._home, self._leg, self._rng = home, leg, rng
        self._first = last_account(home / leg.case)
        self._steps = steps
        self._due: float | None = None
        self._done: int | None = None
        self.sizes: Sizes = {}

    def __call__(self, folder: Path) -> bool:
        """Tell whether the run is to stop now."""
        step = last_account(folder)
        if step > self._first and step not in self.sizes:
            self.sizes[step] = sizes(self._home)
        if self._done is not None:
            # A run that goes on after its fault is told to stop two steps later.
            return step >= self._done + 2
        if step < self._first + self._steps:
            return False
        self._due = self._due or time.monotonic() + self._rng.uniform(0, WITHIN)
        if time.monotonic() < self._due:
            return False
        self._leg.after, self._done = step, step
        return FAULTS[self._leg.fault](self._home, self._rng)


def stop(home: Path, rng: random.Random) -> bool:
    return True


def kill(name: str) -> Callable[[Path, random.Random], bool]:
    def killed(home: Path, rng: random.Random) -> bool:
        os.kill(one(home, name, rng), signal.SIGKILL)
        return False

    return killed


def stand_still(home: Path, rng: random.Random) -> bool:
    engine = one(home, ENGINE, rng)
    os.kill(engine, signal.SIGSTOP)
    try:
        time.sleep(STANDS)
    finally:
        os.kill(engine, signal.SIGCONT)
    return False


def fill(home: Path, rng: random.Random) -> bool:
    with ballast(home).open("wb") as file:
        try:
            while True:
                file.write(bytes(1 << 20))
                file.flush()
        except OSError as full:
            print(full, file=sys.stderr)
    return False


FAULTS: Mapping[str, Callable[[Path, random.Random], bool]] = {
    "engine": kill(ENGINE),
    "rank": kill(RANK),
    "slow": stand_still,
    "stopped": stop,
    "disk": fill,
    STEADILY: stop,
}


def ballast(home: Path) -> Path:
    return home / "ballast"


def one(home: Path, name: str, rng: random.Random) -> int:
    """Return the pid of a process of this kind, drawn at random."""
    found = [pid for pid in processes(HOME_VARIABLE, str(home)) if kind(pid) == name]
    if not found:
        raise RuntimeError(f"no process {name!r} runs in {home}")
    return rng.choice(sorted(found))


def sizes(home: Path) -> dict[str, tuple[float, int]]:
    found: dict[str, tuple[float, int]] = {}
    for pid in processes(HOME_VARIABLE, str(home)):
        name = kind(pid)
        mb, files = found.get(name, (0.0, 0))
        found[name] = max(mb, resident_mb(pid)), max(files, handles(pid))
    return found


def last_account(folder: Path) -> int:
    """Return the newest step that has an account."""
    return max((int(file.stem.split("_")[1]) for file in (folder / "accounts").glob("step_*.json")), default=0)


def last_saved(folder: Path) -> int:
    file = folder / "latest_checkpointed_iteration.txt"
    return int(file.read_text()) if file.exists() else 0


def run_leg(home: Path, leg: Leg, steps: int, rng: random.Random) -> Sizes:
    """Run a leg and judge it; return the sizes of its processes at each step."""
    recipe, settings = CASES[leg.case]
    fault, begun = Fault(home, leg, steps, rng), time.monotonic()
    shared = set(SHARED_MEMORY.iterdir())
    try:
        done = run(
            home,
            recipe,
            *settings,
            name=leg.case,
            record=home,
            recorder="soak_arms",
            folders=(ARMS_FOLDER,),
            variables={"SOAK_ROWS": str(rows_file(home, leg.case))},
            stop_when=fault,
            timeout=HANGS,
        )
    except (TimeoutError, subprocess.TimeoutExpired) as hung:
        leg.wrong.append(f"hung: {hung}")
        return fault.sizes
    finally:
        ballast(home).unlink(missing_ok=True)
        leg.seconds = round(time.monotonic() - begun, 1)
    leg.code = done.code
    leg.wrong += [*ending(leg, done), *left(home, shared), *unread(done.folder)]
    return fault.sizes


def rows_file(home: Path, case: str) -> Path:
    return home / f"{case}.rows"


def ending(leg: Leg, done: Finished) -> Iterator[str]:
    """Yield the faults in a leg's end."""
    if not leg.after:
        yield f"ended with {done.code} before its fault came: {done.output[-600:]}"
    elif leg.fault in ("stopped", "slow", STEADILY) and done.code != STOPPED:
        yield f"ended with {done.code}, not as one that was told to stop: {done.output[-600:]}"
    elif leg.fault in ("engine", "rank") and done.code in (0, STOPPED):
        yield f"ended with {done.code} though a process was killed"
    elif leg.fault == "engine" and not re.search(r"FuseError: .*replica \d", done.output):
        yield "did not name the replica that was lost"
    elif leg.fault == "disk" and done.code != STOPPED and "No space left" not in done.output:
        yield f"ended with {done.code} and did not say that the disk is full"


def left(home: Path, shared: set[Path]) -> Iterator[str]:
    """Yield the processes and files that outlive a leg."""
    for pid in processes(HOME_VARIABLE, str(home)):
        yield f"process {pid} ({kind(pid)}) outlives the leg"
    for path in sorted(set(SHARED_MEMORY.iterdir()) - shared):
        yield f"shared memory {path.name} outlives the leg"


def unread(folder: Path) -> Iterator[str]:
    """Yield the files of a run that are half-written; a checkpoint that is not whole shows when the next leg begins."""
    for file in [*folder.glob("accounts/*.json"), *folder.glob("timeline/*.json")]:
        try:
            json.loads(file.read_text())
        except ValueError as error:
            yield f"{file.relative_to(folder)}: {error}"


def accounts_wrong(folder: Path) -> Iterator[str]:
    """Yield the steps of a case that lack or repeat a sample, and the number of prompts trained twice in an epoch."""
    accounts = Finished(0, "", "", folder).accounts()
    trained = range(1, max(accounts, default=0) + 1)
    for step in trained:
        account = accounts.get(step, {})
        if (account.get("samples"), account.get("missing"), account.get("groups")) != (SAMPLES, 0, PROMPTS):
            shown = {name: account.get(name) for name in ("samples", "missing", "groups")}
            yield f"step {step}: {shown}, not {SAMPLES} samples of {PROMPTS} prompts"
    prompts = Counter(prompt for account in accounts.values() for prompt in account["prompts"])
    if repeated := sum(count > 1 for count in prompts.values()):
        yield f"{repeated} prompts are in two steps"


def growth(found: Sizes) -> dict[str, dict[str, float]]:
    """Return the megabytes and open files by which each kind of process grows a step: slopes over the steps after
    WARM."""
    steps = sorted(found)[WARM:]
    series: dict[str, list[tuple[int, float, int]]] = defaultdict(list)
    for step in steps:
        for name, (mb, files) in found[step].items():
            series[name].append((step, mb, files))
    slopes = {}
    for name, points in series.items():
        if len(points) < len(steps):
            # Processes of this kind came or went.
            continue
        at, mb, files = np.array(points, dtype=float).T
        slopes[name] = {
            "mb": round(float(np.polyfit(at, mb, 1)[0]), 2),
            "files": round(float(np.polyfit(at, files, 1)[0]), 2),
        }
    return slopes


def soak(home: Path, minutes: float, seed: int, cases: Sequence[str], faults: Sequence[str]) -> dict[str, Any]:
    rng, begun = random.Random(seed), time.monotonic()
    legs: list[Leg] = []
    grows: dict[str, dict[str, dict[str, float]]] = {}
    while True:
        case = cases[len(legs) % len(cases)]
        steady = case not in grows
        leg = Leg(case, STEADILY if steady else faults[(len(legs) - len(cases)) % len(faults)])
        found = run_leg(home, leg, STEADY if steady else rng.choice(BEFORE), rng)
        if steady:
            grows[case] = growth(found)
        leg.wrong += accounts_wrong(home / case)
        legs.append(leg)
        print(json.dumps({**asdict(leg), "saved": last_saved(home / case)}), file=sys.stderr, flush=True)
        if leg.wrong or time.monotonic() - begun > 60 * minutes:
            return report(home, legs, grows, cases)


def report(
    home: Path, legs: Sequence[Leg], grows: Mapping[str, Mapping[str, Mapping[str, float]]], cases: Sequence[str]
) -> dict[str, Any]:
    """Return the benchmark's JSON line."""
    accounts = {case: Finished(0, "", "", home / case).accounts() for case in cases}
    rows = [json.loads(line)["rows"] for case in cases if rows_file(home, case).exists()
            for line in rows_file(home, case).read_text().splitlines()]  # fmt: skip
    every = [account for found in accounts.values() for account in found.values()]
    return {
        "bench": "soak",
        "minutes": round(sum(leg.seconds for leg in legs) / 60, 1),
        "legs": dict(Counter(leg.fault for leg in legs)),
        "steps": {case: len(found) for case, found in accounts.items()},
        "samples": sum(account["samples"] for account in every),
        "lost": sum(account["missing"] for account in every),
        "largest_growth_per_step": {
            case: {what: max((slope[what] for slope in found.values()), default=None) for what in ("mb", "files")}
            for case, found in grows.items()
        },
        "growth_per_step": grows,
        "rows_left": max(rows, default=None),
        "longest_leg_seconds": max(leg.seconds for leg in legs),
        "wrong": [f"{leg.case}, {leg.fault} after step {leg.after}: {each}" for leg in legs for each in leg.wrong],
    }


def on_disk(folder: Path, work: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """Run `work` on a disk of its own, of DISK_MB, which can be filled."""
    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)], check=True)
    try:
        return work(disk)
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


def main() -> None:
    arguments = parser(__doc__, "leave the runs here; those on the disk that gets full go with it")
    arguments.add_argument("--minutes", type=float, default=20.0)
    arguments.add_argument("--seed", type=int, default=0)
    arguments.add_argument("--case", choices=tuple(CASES), action="append", help="may be given again; all")
    kinds = [name for name in FAULTS if name != STEADILY]
    arguments.add_argument("--faults", nargs="+", choices=kinds, default=kinds, help="in this order, again and again")
    given = arguments.parse_args()
    root = os.geteuid() == 0
    faults = [name for name in given.faults if root or name != "disk"]
    if not faults:
        arguments.error("--faults disk: needs root")

    def work(folder: Path) -> dict[str, Any]:
        found = soak(folder, given.minutes, given.seed, given.case or list(CASES), faults)
        return {**found, "left_out": [name for name in given.faults if name not in faults]}

    found = in_folder(given.keep, (lambda folder: on_disk(folder, work)) if "disk" in faults else work, again=True)
    sys.exit(bool(found["wrong"]))


if __name__ == "__main__":
    main()
