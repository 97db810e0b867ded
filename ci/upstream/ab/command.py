"""`python -m ci.upstream ab` runs CPU recipes as stock verl and as verl-fuse, in throw-away environments, and compares.

Exit code: 0 green; 1 yellow, slower or larger than allowed; 2 red, numbers differ or a run of verl-fuse failed; 3
nothing could be compared, for instance because stock verl does not run here.
"""

import argparse
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from ci.upstream.ab import environments
from ci.upstream.ab.arms import ARMS
from ci.upstream.ab.compare import compare
from ci.upstream.ab.environments import REPO, Environment
from ci.upstream.ab.record import Record
from ci.upstream.ab.report import Compared, Report
from ci.upstream.ab.runs import LIVE, REPLAYED, Bench
from ci.upstream.arguments import FAILED, Parser
from ci.upstream.fetch import LATEST
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import TASKS, home_from
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.judge import Level
from verl_fuse.spec.files import write_atomically
from verl_fuse_cpu.environment import environment as cpu_environment

CPU_RECIPES = ("ppo-cpu", "grpo-cpu")


def main(arguments: list[str]) -> int:
    """Print the report and write it to `--output`; the exit code gives the verdict."""
    options = parse(arguments)
    # A run then ends with this process.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        report = measure(options)
    except FuseError as error:
        print(f"ci.upstream ab: {error}", file=sys.stderr)
        return FAILED
    options.output.mkdir(parents=True, exist_ok=True)
    write_atomically(options.output / "ab.json", json.dumps(report.as_dict(), indent=1) + "\n")
    write_atomically(options.output / "ab.md", report.as_markdown())
    print(report.as_markdown(), end="")
    return int(report.verdict)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m ci.upstream ab", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--verl", metavar="VERSION", help="a version on the package index, or `latest`; default: installed"
    )
    which.add_argument("--path", type=Path, metavar="TREE", help="a source tree of verl")
    parser.add_argument("--recipe", action="append", choices=CPU_RECIPES, help="default: ppo-cpu; may be repeated")
    parser.add_argument("--arm", action="append", choices=ARMS, help="default: all; may be repeated")
    parser.add_argument(
        "--with-plugin", action="append", default=[], metavar="PATH", help="a package to install with verl-fuse"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", default=Path("runs/upstream"), help="where ab.md and ab.json go"
    )
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep environments and runs in a new folder there")
    options = parser.parse_args(arguments)
    options.recipe = list(dict.fromkeys(options.recipe or ["ppo-cpu"]))
    options.arm = list(dict.fromkeys(options.arm or ARMS))
    return options


def measure(options: argparse.Namespace) -> Report:
    """Make the environments, run everything, and return the comparison."""
    load = os.getloadavg()[0]
    with ExitStack() as stack:
        if options.keep is None:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verl-fuse-ab-")))
        else:
            options.keep.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix="ab-", dir=options.keep)).absolute()
        stock, fused = make_environments(work, source(options), options.with_plugin)
        task = home_from(os.environ)
        make_task(fused, task / "tasks/euclid")
        compared = [
            one
            for recipe in map(find_recipe, options.recipe)
            for one in compare_recipe(Bench(stock, fused, recipe, work / recipe.name, task), options.arm)
        ]
        conditions = {
            "cores": str(len(os.sched_getaffinity(0))),
            "load before": f"{load:.1f} processes",
            "steps": f"{len(REPLAYED)} replayed, {LIVE} generating",
            "installed with verl-fuse": ", ".join(Path(path).name for path in options.with_plugin) or "nothing",
        }
        return Report(fused.versions(), conditions, compared)


def source(options: argparse.Namespace) -> str:
    """Return the requirement that pip is asked for."""
    if options.path is not None:
        return str(options.path.absolute())
    if options.verl == LATEST:
        return "verl"
    return f"verl=={options.verl or importlib.metadata.version('verl')}"


def make_environments(work: Path, verl: str, plugins: Sequence[str]) -> tuple[Environment, Environment]:
    """Return two environments: stock verl with the cpu platform alone, and verl with verl-fuse and `plugins`."""
    wheels = work / "wheels"
    wheels.mkdir()
    upstream, ours = environments.wheel(verl, wheels), environments.wheel(str(REPO), wheels)
    strangers = [environments.wheel(plugin, wheels) for plugin in plugins]
    return (
        environments.make(work / "stock", [upstream], platform=ours),
        environments.make(work / "fused", [upstream, ours, *strangers]),
    )


def make_task(environment: Environment, folder: Path) -> None:
    """Make the data and the warm-started model that all CPU recipes train on, unless they are there."""
    command = [str(environment.python), "-P", "-m", *TASKS["euclid"], "--out", str(folder)]
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | cpu_environment()
    if subprocess.run(command, env=variables).returncode:
        raise FuseError(f"the task could not be made: {' '.join(command)}")


def compare_recipe(bench: Bench, arms: Sequence[str]) -> Iterator[Compared]:
    """Record rollouts as stock verl, replay them as stock verl, then compare each arm with the replay; twice where time
    or memory is too much."""
    for name, steps in (("recording", len(REPLAYED)), ("stock", len(REPLAYED) + LIVE)):
        stock = bench.run(name, stock=True, installed=False, steps=steps)
        if stock.code != 0:
            raise FuseError(f"nothing to compare with: {bench.recipe.name} {stock.ending} on stock verl:\n{stock.note}")
    paces: list[Record] = []
    for name in arms:
        arm = ARMS[name]
        one, done = compare_arm(bench, stock, name, name, paces)
        if one.verdict is Level.YELLOW:
            # Other work on the machine may have taken time; a run that is really slower is slower twice.
            again, done = compare_arm(bench, stock, name, f"{name}-again", paces)
            one = replace(again, first=one.findings)
        if arm.stock and one.verdict is Level.GREEN:
            paces.append(done)
        yield one


def compare_arm(
    bench: Bench, stock: Record, name: str, folder: str, paces: Sequence[Record]
) -> tuple[Compared, Record]:
    """Run one arm in the folder `folder` of the bench, and compare the run with `stock`."""
    arm = ARMS[name]
    done = bench.run(folder, arm.overrides, stock=arm.stock, installed=True, steps=len(REPLAYED) + LIVE)
    return Compared(bench.recipe.name, name, tuple(compare(stock, done, arm.expected, paces)), done.note), done
