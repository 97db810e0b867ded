"""`verl-fuse profile`: measures the device at hand for the cost model. Needs torch; reading a profile does not."""

import importlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.prose import say
from verl_fuse.cli.report import logged
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.cost.floors import StageError, fit_floors, stage_errors
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.recorded import RecordedRun, run_of
from verl_fuse.cost.table import PARTS, MeasuredModel, ProfileTable
from verl_fuse.errors import FuseError
from verl_fuse.extras import install
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.files import check_writable
from verl_fuse.spec.model_names import model_from
from verl_fuse.spec.run_config import FILE, find_config
from verl_fuse.spec.timeline import INFERENCE_STAGES
from verl_fuse.timeline.files import TIMELINE_FOLDER, located, readable_steps, recorded_steps

# These counts exceed any useful grid; a mistaken number would take all memory.
MOST = {"tp": 1024, "batches": 65536, "lengths": 2**20}
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EXAMPLES = examples(
    "verl-fuse profile --model qwen2.5-0.5b --out profile.json",
    "verl-fuse profile --model qwen2.5-7b --device cuda --precision bfloat16 --tp 1,2,4 --out profile.json",
)


@app.command(epilog=EXAMPLES)
def profile(
    out: Annotated[Path, typer.Option(help="Where the profile goes (JSON).")],
    model: Annotated[list[str], typer.Option(help="Size name, or path of a config.json or its folder; repeatable.")],
    device: Annotated[str, typer.Option(help="As torch names it: cpu, cuda, cuda:1.")] = "cpu",
    precision: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    tp: Annotated[str, typer.Option(help="Tensor-parallel degrees whose shards are measured.")] = "1",
    batches: Annotated[str, typer.Option(help="Batch sizes.")] = "1,4,16,64",
    lengths: Annotated[str, typer.Option(help="Sequence lengths.")] = "16,64,256",
    threads: Annotated[int, typer.Option(min=1, help="Threads of one rank, on a CPU.")] = 1,
    beside: Annotated[
        int, typer.Option(min=0, max=1024, help="Ranks of a run beside the one, on a CPU: as many processes compute.")
    ] = 0,
    from_run: Annotated[
        list[Path] | None,
        typer.Option(
            "--from",
            help="Run of the first model, recorded or logged; the software's floors are read off it; repeatable.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure embedding, block and head of models over a grid of batch sizes and lengths."""
    degrees, sizes, tokens = (_counts(*pair) for pair in (("tp", tp), ("batches", batches), ("lengths", lengths)))
    models = [model_from(name) for name in model]
    runs = [read_run(path) for path in from_run or []]
    check_writable(out)
    measuring = _measuring(threads)
    bench = measuring.BenchSettings.on(device, precision)
    if beside and bench.device.type != "cpu":
        raise FuseError(f"--beside {beside}: needs --device cpu; ranks have accelerators of their own")
    measured: list[MeasuredModel] = []
    with ProgressNotes("measuring") as report, measuring.busy(beside, threads):
        for each in models:
            for degree in degrees:
                report(f"measuring {each.name}, tp {degree} ({len(measured) + 1} of {len(models) * len(degrees)})")
                measured.append(measuring.measure_model(bench, each, degree, sizes, tokens))
                if not as_json:
                    print_measured(measured[-1])
        report("measuring the device")
        table = ProfileTable(measuring.measure_device(bench), precision, threads, tuple(measured))
    errors = {}
    if runs:
        table = with_floors(table, runs)
        errors = {run.name: stage_errors(run, models[0], cost_of(table, runs)) for run in runs}
    table.write(out)
    if as_json:
        print_json(
            {
                "device": table.device.name,
                "file": str(out),
                "profile": json.loads(table.to_json()),
                "runs": {name: [asdict(stage) for stage in found] for name, found in errors.items()},
                "notes": notes_of(runs),
            }
        )
        return
    for name, found in errors.items():
        print_errors(name, found)
    for note in notes_of(runs):
        say(f"Note: {note}")
    typer.echo(f"profile of {table.device.name}: {out}")


def with_floors(table: ProfileTable, runs: list[RecordedRun]) -> ProfileTable:
    """Return the profile with the floors of the software, read off runs of its first model on one node of its
    device."""
    engine = fit_floors(runs, table.models[0].model, cost_of(table, runs))
    return replace(table, engine=engine, sources=tuple(run.name for run in runs))


def cost_of(table: ProfileTable, runs: list[RecordedRun]) -> ProfiledCost:
    """Return the profile's costs on one node that has room for each run. The floors contain the links of the node."""
    return ProfiledCost.of(
        table, Cluster(1, max(run.ranks for run in runs), table.device, *(table.device.bandwidth,) * 3)
    )


def notes_of(runs: list[RecordedRun]) -> list[str]:
    """Return what a reader must know of floors that were read off these runs."""
    notes = []
    if sum(len(run.steps) for run in runs) == 1:
        notes.append(
            "the floors are read off one step, whose noise is in them; add --from RUN_DIR, or record more steps"
        )
    if runs and not any(stage in step.stages for run in runs for step in run.steps for stage in INFERENCE_STAGES):
        notes.append(
            "no step has a pass for log-probs or values on all workers: the seconds of a call are counted with those "
            "of an update"
        )
    return notes


def print_errors(run: str, found: list[StageError]) -> None:
    """Print measured and predicted seconds by stage, and the stage that is furthest off."""
    columns = numbers("measured s", "predicted s", "of it floors s", "real / predicted")
    table = Table("stage", *columns, title=f"{run}: median seconds by stage", title_justify="left")
    for each in found:
        table.add_row(
            each.stage,
            f"{each.measured:.3f}",
            f"{each.predicted:.3f}",
            f"{each.floors:.3f}",
            f"{each.measured / each.predicted:.2f}" if each.predicted else "",
        )
    print_table(table)
    worst = max(found, key=lambda each: abs(each.measured - each.predicted))
    measured, predicted = (sum(getattr(each, name) for each in found) for name in ("measured", "predicted"))
    say(
        f"{run}: measured {measured:.2f} s, predicted {predicted:.2f} s in these stages; furthest off is "
        f"{worst.stage}, {worst.measured:.2f} s against {worst.predicted:.2f} s"
    )


def read_run(run_dir: Path) -> RecordedRun:
    """Return a run with the configuration that was kept in its folder: recorded, or by verl's log of its steps alone
    where it has no timeline."""
    run_dir, _ = located(run_dir)
    config, metrics = find_config(run_dir), logged(run_dir).steps
    recorded = [] if metrics and not (run_dir / TIMELINE_FOLDER).is_dir() else recorded_steps(run_dir)
    if config is None:
        raise FuseError(f"{run_dir / FILE}: no such file; the run's configuration gives its micro-batch sizes")
    try:
        return run_of(run_dir.name, config, list(readable_steps(run_dir, recorded)), metrics)
    except FuseError as error:
        raise FuseError(f"{run_dir}: {error}") from error


def _measuring(threads: int) -> Any:
    """Return the measuring code: the only part that needs torch."""
    try:
        measuring = importlib.import_module("verl_fuse.runtime.profile")
    except ImportError as error:
        raise FuseError(f"profile needs torch ({error}): {install('verl')}, or torch itself") from error
    measuring.set_threads(threads)
    return measuring


def _counts(option: str, text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise FuseError(f"--{option}={text}: needs whole numbers >= 1 with commas between them, such as 1,4,16")
    most = MOST[option]
    if too_many := [part for part in parts if len(part) > 9 or int(part) > most]:
        raise FuseError(f"--{option}={too_many[0]}: needs at most {most}")
    return tuple(sorted({int(part) for part in parts}))


def print_measured(measured: MeasuredModel) -> None:
    """Print the table of one model."""
    title = f"{measured.model.name}, tp {measured.tp}: milliseconds at the smallest, middle and largest of the grid"
    table = Table("part", "pass", *numbers("smallest", "middle", "largest"), title=title, title_justify="left")
    by_pair = {(m.part, m.direction): m for m in measured.measurements}
    for pair in PARTS:
        rows = by_pair[pair].seconds
        chosen = (rows[0][0], rows[len(rows) // 2][len(rows[0]) // 2], rows[-1][-1])
        table.add_row(*pair, *(f"{1e3 * seconds:.3f}" for seconds in chosen))
    print_table(table)
