"""Defines `verl-fuse simulate`: the seconds that a step would take, stock and with each feature. Needs neither torch
nor verl nor a device."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from verl_fuse import plugins
from verl_fuse.advice import LEAST_GAIN_SHARE, advice_of_rows
from verl_fuse.cli import interrupt
from verl_fuse.cli.asked_step import STEP, AskedStep, asked_step
from verl_fuse.cli.assumed import OPTIONS, read_options, read_settings
from verl_fuse.cli.cluster_argument import CLUSTER_HELP, price_of
from verl_fuse.cli.composition import select
from verl_fuse.cli.output import Json, examples, note, print_json
from verl_fuse.cli.policy import simulated_policy
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.prose import say
from verl_fuse.cli.refused import Refusals, idle_in
from verl_fuse.cli.replay import features_on, recorded_acceptance, show_advice, show_replay, verdict_of
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.compare.run import METRICS_FILE
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError, listed
from verl_fuse.feature import Feature
from verl_fuse.simulate.compare import Comparison, Estimate, StrategyResult
from verl_fuse.simulate.options import STOCK_METRICS, SimulationOptions, features_of
from verl_fuse.simulate.stock import by_tensor_parallel
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.files import check_folder, reason, save
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.run_config import FILES as CONFIG_FILES
from verl_fuse.spec.workload import Workload
from verl_fuse.timeline.files import page_of, record_step
from verl_fuse.timeline.strategies_page import Strategy, strategies_page

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EXAMPLES = examples(
    "verl-fuse simulate step.yaml h100x4",
    "verl-fuse simulate h100 --script run_grpo.sh --set step.response=lognormal:median=900,sigma=0.7,max=4096",
    "verl-fuse simulate step.yaml cluster.yaml --strategy interstage --set migration=prefill",
    "verl-fuse simulate step.yaml h100x4 --strategy interstage --policy acme_fuse:LongestFirst",
    "verl-fuse simulate --from runs/ppo-cpu --json",
)
# Intervals no longer become narrower long before.
MOST_STEPS = 1000
# The row of the advised features together.
ADVISED = "advised"
STRATEGIES_PAGE = "strategies.html"
SIMULATED_STEPS = 8
FAR_OFF = (
    "nothing was run: with the floors of 2025's frameworks published steps took 1.02 to 1.61 times as predicted, "
    "median error 13 %; with verl 0.9.1's, as here, log-probs and update on one H200 2.3 and 1.9 times "
    "(verl_fuse/cost/README.md)"
)


@app.command(epilog=EXAMPLES)
def simulate(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[WORKLOAD.yaml] CLUSTER [-- ARGUMENTS]",
            help="The step, in a file or as arguments of verl.trainer.main_ppo, and its devices. "
            f"{CLUSTER_HELP} Of a launched run, CLUSTER names the kind alone.",
        ),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A launched run in place of WORKLOAD.yaml, as of `verl-fuse check`."),
    ] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan for the strategy realloc.")] = None,
    strategy: Annotated[
        list[str] | None,
        typer.Option(
            help="A feature or another strategy, or several with + between them; repeatable. Default: all, realloc "
            "only with --plan."
        ),
    ] = None,
    seeds: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_STEPS, help=f"Steps to simulate, each with lengths of its own; default: {SIMULATED_STEPS}."
        ),
    ] = None,
    timeline: Annotated[Path | None, typer.Option(help="Folder for a timeline page of every strategy.")] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MODULE:CLASS",
            help="A policy of yours (a plugin's class), which gets a row; its module is looked for in the working "
            "directory, too. Repeatable.",
        ),
    ] = None,
    profile: Annotated[Path | None, typer.Option(help="A profile written by `verl-fuse profile`.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help=f"What is assumed. {OPTIONS}")
    ] = None,
    from_: Annotated[
        Path | None, typer.Option("--from", help="A recorded run: what would each feature have saved?")
    ] = None,
    drafts_of: Annotated[
        Path | None,
        typer.Option(
            "--acceptance-of", help="A run with fuse.speculation.enabled=true, whose acceptance of drafts is assumed."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare stock verl with every feature, from lengths and costs alone, or on a run already made."""
    if from_ is not None:
        if words or script or plan or profile or timeline or strategy or policy or seeds:
            raise FuseError("--from RUN_DIR takes everything from the run; only --set and --acceptance-of go with it")
        show_replay(from_, _drafting(read_options(set_ or []), drafts_of), as_json)
        return
    if timeline is not None:
        check_folder(timeline)
    seeds, features, settings = seeds or SIMULATED_STEPS, plugins.features(plugins.load()), read_settings(set_ or [])
    asked = asked_step(words or [], script, settings.step)
    for line in asked.notes:
        note(line)
    options = _drafting(read_block(SimulationOptions, {**asked.options, **settings.options}, "options"), drafts_of)
    workload, machines = asked.workload, asked.cluster
    checks, idle = Refusals(asked.config), idle_in(asked.config, features)
    refusals = checks.of(features, whole=bool(asked.preset))
    named = {name: feature.strategy for name, feature in features.items() if feature.strategy}
    preset, about_preset = preset_of(asked, options)
    for text in strategy or ():
        for part in text.split("+"):
            if part in features and not features[part].strategy:
                raise FuseError(f"strategy={text!r}: {part} is not simulated; `verl-fuse ab` measures it")
        require_open("+".join(part for part in text.split("+") if part not in preset), features, refusals)
    on = features_on(asked.config, features)
    against: dict[str, Sequence[str]] = {
        **{name: why for name, why in refusals.items() if why},
        **{name: (why,) for name, why in idle.items()},
        **dict.fromkeys(on, ("it is on",)),
    }
    authors = {name: simulated_policy(name, workload) for name in dict.fromkeys(policy or ())}
    decided = {name: decides for name, (decides, _) in authors.items()}
    given, rows, advised = Plan.read(plan) if plan else None, [], None
    with ProgressNotes(f"simulating {workload.sequences} samples on {machines.devices} devices") as report:
        cost = cost_model(machines, profile, settings.floors)
        # `copies` is there to be compared with `stream`.
        without = {*against, *(["copies"] if "stream" in against else [])}
        comparison = Comparison(
            workload, cost, strategy, seeds, given, options, report, named | preset, decided, without
        )
        try:
            for row in comparison.rows():
                _, about = authors.get(row.strategy, (None, ()))
                about = about_preset if row.strategy in preset else about
                rows.append(dataclasses.replace(row, notes=(*about, *row.notes)))
            open_ = {name: one for name, one in features.items() if name not in against}
            advised = advice_of_rows(rows, open_, checks.together, comparison.row)
        except KeyboardInterrupt:
            if not rows:
                raise
    widths = by_tensor_parallel(workload, cost, dataclasses.replace(options, acceptance=None, rollout_tp=None))
    shown = [*rows]
    if advised and advised[1] not in rows:
        whole = advised[1]
        shown.append(dataclasses.replace(whole, strategy=ADVISED, notes=(f"is {whole.strategy}", *whole.notes)))
    pages = []
    if timeline is not None:
        verdict = verdict_of(advised[0]) if advised else ""
        pages = write_timelines(
            timeline, shown, _title(workload, machines, seeds), verdict, _origin(machines, profile, seeds)
        )
    if as_json:
        data = as_data(rows, workload, machines, seeds, pages)
        data["rollout_tp"] = [
            {"tp": tp, "layout": str(at.layout), "generation_seconds": taken} for tp, (at, taken) in widths.items()
        ]
        data |= {"without": {name: listed(why) for name, why in against.items()}, "assumed": asked.assumed}
        data |= {"problems": asked.problems, "not_modelled": asked.not_modelled}
        if advised:
            advice, row = advised
            figures = {"seconds": dataclasses.asdict(row.seconds), "speedup": dataclasses.asdict(row.speedup)}
            data |= {"advice": dataclasses.asdict(advice), "advised": {"strategy": row.strategy, **figures}}
        print_json(data)
    else:
        show(shown, workload, machines, seeds)
        say(_widths_text(widths, options.rollout_tp))
        if profile is None and not machines.device.is_cpu:
            say(FAR_OFF)
        if asked.assumed:
            values = ", ".join(f"{STEP}{key}={value}" for key, value in asked.assumed.items())
            say(f"assumed, as the launch does not tell it: {values}; --set {STEP}KEY=VALUE takes yours")
        for about in asked.not_modelled:
            say(f"not simulated: {about}")
        others = {name: f" (other reasons: {len(why) - 1})" if len(why) > 1 else "" for name, why in against.items()}
        for why, names in alike((f"{against[name][0]}{others[name]}", name) for name in sorted(against)).items():
            say(f"without {', '.join(names)}: {why}")
        for problem in asked.problems:
            say(f"The run cannot start: {problem}")
        if pages:
            typer.echo(f"Page: {pages[0]}")
        for name in authors:
            say(_policy_text(name, rows))
        if advised and asked.problems:
            say(verdict_of(advised[0]))
        elif advised and preset and not any(row.strategy in features for row in rows):
            for row in (row for row in rows if row.strategy in preset):
                whole = f"fuse.preset={row.strategy} is {row.speedup.mean:.2f} times as fast as stock"
                say(f"Verdict: {whole}; no feature was simulated alone (--strategy).")
                typer.echo(f"Paste: {' '.join(asked.paste)}")
        elif advised:
            as_good = _is_as_good(preset, rows, advised[1])
            for row in (row for row in rows if row.strategy in preset and not as_good):
                say(f"fuse.preset={row.strategy} alone is {row.speedup.mean:.2f} times as fast as stock.")
            show_advice(advised[0], asked.paste if as_good else ())
    if advised is None:
        raise typer.Exit(interrupt.CODE)


def require_open(strategy: str, features: Mapping[str, Feature], refusals: Mapping[str, Sequence[str]]) -> None:
    """Raise a FuseError where verl-fuse refuses a part of a strategy in this step, or features of two parts of it
    together."""
    parts = [
        [features[part]] if part in features else [one for name, one in features.items() if name in features_of(part)]
        for part in filter(None, strategy.split("+"))
    ]
    for one in (one for part in parts for one in part):
        if refusals[one.name]:
            raise FuseError(f"strategy={strategy!r}: {one.name} is refused in this step: {listed(refusals[one.name])}")
    together = Refusals(None).together
    for some, others in combinations(parts, 2):
        for one, other in product(some, others):
            if one is not other and (found := together(one, other)):
                said = f"{one.name} and {other.name} are refused together: {found[0]}"
                raise FuseError(f"strategy={strategy!r}: {said}")


def preset_of(asked: AskedStep, options: SimulationOptions) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return the preset of a launched run as the name of a strategy, and notes on what of it is simulated."""
    if not asked.preset:
        return {}, ()
    drafts = {"speculation"} if options.acceptance is None else set[str]()
    simulated = [one.strategy for one in asked.chosen if one.strategy and one.strategy not in drafts]
    others = [one.switch for one in asked.chosen if one.strategy not in simulated]
    keys = (keys for one in asked.chosen for name, keys in one.presets.items() if name == asked.preset)
    given = select(asked.config, "fuse.update.metrics")
    # A preset leaves a key that is set.
    metrics = [given] if given is not None else [each.get("update.metrics") for each in keys]
    if simulated and "computed" not in metrics:
        simulated.append(STOCK_METRICS)
    but = f"; not simulated of it: {', '.join(others)}" if others else ""
    on = f"fuse.preset={asked.preset} switches on {', '.join(one.switch for one in asked.chosen) or 'nothing'}"
    return {asked.preset: "+".join(simulated) or "observe"}, (on + but,)


def _drafting(options: SimulationOptions, drafts_of: Path | None) -> SimulationOptions:
    return options if drafts_of is None else dataclasses.replace(options, acceptance=recorded_acceptance(drafts_of))


def show(rows: list[StrategyResult], workload: Workload, cluster: Cluster, seeds: int) -> None:
    """Print the table, and the decisions of the features."""
    title = f"Predicted: {_title(workload, cluster, seeds)}"
    priced = cluster.price_per_device_hour > 0
    money = "USD a step" if priced else "device hours a step"
    columns = numbers("step s", "gen + inf s", "train s", "speed-up", "idle", money, "cost / stock")
    table = Table("strategy", *columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(
            _named(row),
            f"{row.seconds.mean:.2f}",
            f"{row.generation_and_inference:.2f}",
            f"{row.training:.2f}",
            _interval(row.speedup, 3),
            f"{row.idle:.0%}",
            f"{row.cost.mean if priced else row.device_hours:.3g}",
            f"{row.cost_ratio.mean:.3f}",
        )
    print_table(table)
    for text, names in alike((text, row.strategy) for row in rows for text in _notes(row)).items():
        say(f"{', '.join(names)}: {text}")
    placed = (f"{call.call} {call.layout} ({call.microbatches})" for call in rows[0].example.plan.calls)
    say(f"stock's layouts (and micro-batches): {', '.join(placed)}")


def alike(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the names of each text, of pairs of a text and a name."""
    found: dict[str, list[str]] = {}
    for text, name in pairs:
        found.setdefault(text, []).append(name)
    return found


def _named(row: StrategyResult) -> str:
    return f"{row.strategy} (faulty)" if row.faults else row.strategy


def _notes(row: StrategyResult) -> tuple[str, ...]:
    """Return what a reader of the row needs to know, a policy's first fault before all."""
    if len(row.faults) == 0:
        return row.notes
    others = len({*row.faults}) - 1
    more = f"; other failures: {others}" if others else ""
    count = f"{len(row.faults)} step{'s' if len(row.faults) > 1 else ''}"
    return f"FAULTY in {count}, whose rest went on without it: {row.faults[0]}{more}", *row.notes


def _policy_text(name: str, rows: Sequence[StrategyResult]) -> str:
    """Compare an author's policy with what a run has without it: observe mode, or stock where that has no row."""
    known = {row.strategy: row for row in rows}
    if name not in known:
        return f"{name} was not simulated"
    base, row = known.get("observe", rows[0]), known[name]
    low, high = row.speedup.low / base.speedup.mean, row.speedup.high / base.speedup.mean
    ratio = base.seconds.mean / row.seconds.mean
    faulty = ", although it is faulty" if row.faults else ""
    built_in = max((one for one in rows if one is not row), key=lambda one: one.speedup.mean)
    beside = (
        f", {built_in.seconds.mean / row.seconds.mean:.2f} times as fast as {built_in.strategy}'s"
        if built_in is not base
        else ""
    )
    return f"{name}: steps are {ratio:.2f} times as fast as {base.strategy}'s [{low:.2f}, {high:.2f}]{beside}{faulty}"


def _widths_text(widths: Mapping[int, tuple[CallPlan, float]], own: int | None) -> str:
    fastest = min(widths, key=lambda tp: widths[tp][1])
    each = ", ".join(f"tp{tp} {seconds:.2f} s" for tp, (_, seconds) in widths.items())
    has = f"the fastest, tp{fastest}" if own is None else f"the run's, tp{own}"
    return f"stock's generation by tensor parallelism of the rollout: {each}; stock above has {has}"


def _title(workload: Workload, cluster: Cluster, seeds: int) -> str:
    samples = f"{workload.algorithm} of {workload.actor.name}, {workload.sequences} samples"
    nodes = f" ({cluster.nodes} nodes of {cluster.devices_per_node})" if cluster.nodes > 1 else ""
    on = f"on {cluster.devices} x {cluster.device.name}{nodes}"
    return f"{samples}, {on}; {_steps(seeds)}; {price_of(cluster)}"


def _origin(cluster: Cluster, profile: Path | None, seeds: int) -> str:
    """Tell where the numbers of the strategies' page come from."""
    known = "its data sheet" if profile is None else f"the profile {profile.name}"
    drawn = "seed 0" if seeds == 1 else f"seeds 0 to {seeds - 1}"
    return (
        f"Simulated: nothing on this page was run. Seconds are those of a model of {cluster.device.name} by {known}; "
        f"lengths of responses are drawn with {drawn}, the same for every strategy, and the charts are of seed 0."
    )


def _steps(count: int) -> str:
    return "1 step each" if count == 1 else f"{count} steps each, 95 % intervals over their lengths alone"


def _interval(value: Estimate, digits: int) -> str:
    if value.low == value.high:
        return f"{value.mean:.{digits}f}"
    return f"{value.mean:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def as_data(
    rows: list[StrategyResult],
    workload: Workload,
    cluster: Cluster,
    seeds: int,
    pages: list[Path | None],
) -> dict[str, Any]:
    """Return the keys of `--json`: times in seconds, costs in USD, both per step."""
    strategies = [
        {
            "strategy": row.strategy,
            "seconds": dataclasses.asdict(row.seconds),
            "generation_and_inference_seconds": row.generation_and_inference,
            "training_seconds": row.training,
            "speedup": dataclasses.asdict(row.speedup),
            "idle_fraction": row.idle,
            "device_hours": row.device_hours,
            "cost_usd": dataclasses.asdict(row.cost),
            "cost_ratio": dataclasses.asdict(row.cost_ratio),
            "notes": row.notes,
            "faults": row.faults,
        }
        for row in rows
    ]
    stock = {
        call.call: {"layout": str(call.layout), "microbatches": call.microbatches}
        for call in rows[0].example.plan.calls
    }
    return {
        "algorithm": workload.algorithm,
        "actor": workload.actor.name,
        "samples": workload.sequences,
        "device": cluster.device.name,
        "devices": cluster.devices,
        "usd_per_device_hour": cluster.price_per_device_hour,
        "steps": seeds,
        "strategies": strategies,
        "stock_plan": stock,
        "pages": [str(page) for page in pages],
    }


def write_timelines(
    folder: Path, rows: list[StrategyResult], title: str, verdict: str, origin: str
) -> list[Path | None]:
    """Write one run folder per strategy, like the folder of a recorded run, and a page that shows all strategies;
    return the page first."""
    pages, strategies = [], []
    # A link may not begin with a word and a colon.
    runs = [folder / row.strategy.replace(":", ".") for row in rows]
    for run in runs:
        if any((run / name).exists() for name in (METRICS_FILE, *CONFIG_FILES)):
            raise FuseError(f"{run} is the folder of a run that was made: --timeline needs another folder")
    for row, run in zip(rows, runs, strict=True):
        try:
            record_step(run, dataclasses.replace(row.example.spans, run=f"{row.strategy}, simulated: {title}"))
        except OSError as error:
            raise FuseError(f"{run}: cannot be written: {reason(error)}") from error
        pages.append(page := page_of(run, 1))
        link = page.relative_to(folder).as_posix() if page else ""
        figures = row.seconds.mean, row.speedup.mean, row.idle
        strategies.append(
            Strategy(_named(row), row.example.spans, *figures, notes=_notes(row), page=link, faulty=bool(row.faults))
        )
    together = folder / STRATEGIES_PAGE
    save(together, strategies_page(title, verdict, origin, strategies))
    return [together, *pages]


def _is_as_good(preset: Mapping[str, str], rows: Sequence[StrategyResult], advised: StrategyResult) -> bool:
    """Tell whether the row of the preset is as fast as what is advised."""
    near = (1 + LEAST_GAIN_SHARE) * advised.seconds.mean
    return any(row.strategy in preset and row.seconds.mean <= near for row in rows)
