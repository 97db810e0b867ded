"""Defines `verl-fuse simulate`: the seconds that a step would take, stock and with each feature. Needs neither torch
nor verl nor a device."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer
import yaml
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from verl_fuse import plugins
from verl_fuse.advice import LEAST_GAIN_SHARE, Advice, advice_of_replay, advice_of_rows
from verl_fuse.cli import interrupt
from verl_fuse.cli.asked_step import STEP, AskedStep, asked_step
from verl_fuse.cli.cluster_argument import CLUSTER_HELP, price_of
from verl_fuse.cli.composition import select
from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.policy import simulated_policy
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.prose import say
from verl_fuse.cli.refused import excluded, idle_in, open_features, refusals_of
from verl_fuse.cli.report import read_metrics
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.compare.run import METRICS_FILE
from verl_fuse.cost.calibration import EngineFloors
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError, listed
from verl_fuse.feature import Feature
from verl_fuse.simulate.compare import Comparison, Estimate, StrategyResult
from verl_fuse.simulate.drafts import acceptance_of
from verl_fuse.simulate.options import SimulationOptions, features_of
from verl_fuse.simulate.recorded import Replay, Saving, read_recorded, replay
from verl_fuse.simulate.stock import by_tensor_parallel
from verl_fuse.spec.block import read_block
from verl_fuse.spec.cluster import Cluster
from verl_fuse.spec.composed import ACTOR, CRITIC, Get, getter, on_accelerators
from verl_fuse.spec.files import check_folder, reason, write_atomically
from verl_fuse.spec.plan import CallPlan, Plan
from verl_fuse.spec.run_config import find_config
from verl_fuse.spec.workload import Workload
from verl_fuse.timeline.files import located, page_of, readable_steps, record_step, recorded_steps
from verl_fuse.timeline.strategies_page import Strategy, strategies_page

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
EXAMPLES = examples(
    "verl-fuse simulate step.yaml h100x4",
    "verl-fuse simulate h100 --script run_grpo.sh --set step.response=lognormal:median=900,sigma=0.7,max=4096",
    "verl-fuse simulate step.yaml cluster.yaml --strategy interstage --set migration=prefill",
    "verl-fuse simulate step.yaml h100x4 --strategy interstage --policy acme_fuse:LongestFirst",
    "verl-fuse simulate --from runs/ppo-cpu --json",
)
# These are the counts of fuse.speculation in the metrics file.
DRAFTED_METRIC, ACCEPTANCE_METRIC, TOKENS_METRIC = (
    f"fuse/speculation_{name}" for name in ("drafted_tokens", "acceptance", "tokens_per_pass")
)
# Intervals no longer become narrower long before.
MOST_STEPS = 1000
# The row of the advised features together.
ADVISED = "advised"
STRATEGIES_PAGE = "strategies.html"
SIMULATED_STEPS = 8
FLOORS = "floors."
FAR_OFF = (
    "nothing was run: published steps took 1.02 to 1.61 times such predictions (median error 13 %), log-probs and "
    "update on one H200 2.3 and 1.9 times (verl_fuse/cost/README.md)"
)
OPTIONS = (
    f"Repeatable: {STEP}KEY, a key of the step in place of the file's or the run's; "
    + ", ".join(f"{field.name}={field.default}" for field in dataclasses.fields(SimulationOptions))
    + f"; seconds that the software adds: {FLOORS}"
    + f", {FLOORS}".join(f"{field.name}" for field in dataclasses.fields(EngineFloors) if field.name != "name")
    + "."
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
    for note in asked.notes:
        typer.echo(f"verl-fuse: {note}", err=True)
    options = _drafting(read_block(SimulationOptions, {**asked.options, **settings.options}, "options"), drafts_of)
    workload, machines = asked.workload, asked.cluster
    refusals, idle = refusals_of(asked.config, features, whole=bool(asked.preset)), idle_in(asked.config, features)
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
            advised = advice_of_rows(rows, open_, excluded(asked.config), comparison.row)
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
        verdict = _verdict(advised[0]) if advised else ""
        pages = write_timelines(
            timeline, shown, _title(workload, machines, seeds), verdict, _origin(machines, profile, seeds)
        )
    if as_json:
        data = as_data(rows, workload, machines, seeds, pages) | {"rollout_tp": _widths_data(widths)}
        data |= {"without": {name: listed(why) for name, why in against.items()}, "assumed": asked.assumed}
        print_json(data | (_advised_data(*advised) if advised else {}))
    else:
        show(shown, workload, machines, seeds)
        say(_widths_text(widths, options.rollout_tp))
        if profile is None and not machines.device.is_cpu:
            say(FAR_OFF)
        if asked.assumed:
            values = ", ".join(f"{STEP}{key}={value}" for key, value in asked.assumed.items())
            say(f"assumed, as the launch does not tell it: {values}; --set {STEP}KEY=VALUE takes yours")
        for name in sorted(against):
            first, *more = against[name]
            say(f"without {name}: {first}{f' (and {len(more)} more reasons)' if more else ''}")
        if pages:
            typer.echo(f"Page: {pages[0]}")
        for name in authors:
            say(_policy_text(name, rows))
        if advised:
            show_advice(advised[0], asked.paste if _is_as_good(preset, rows, advised[1]) else ())
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
    together = excluded(None)
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
    notes = [f"fuse.preset={asked.preset} switches on {', '.join(one.switch for one in asked.chosen) or 'nothing'}"]
    notes += [f"not simulated of it: {', '.join(others)}"] if others else []
    return {asked.preset: "+".join(simulated) or "observe"}, tuple(notes)


def _drafting(options: SimulationOptions, drafts_of: Path | None) -> SimulationOptions:
    return options if drafts_of is None else dataclasses.replace(options, acceptance=recorded_acceptance(drafts_of))


class Given(NamedTuple):
    """The settings of `--set`: options, floors and keys of the workload, by their names."""

    options: dict[str, Any]
    floors: dict[str, Any]
    step: dict[str, Any]


def read_options(settings: list[str]) -> SimulationOptions:
    """Read the options of a replay, which has a step and floors of its own, from KEY=VALUE pairs."""
    given = read_settings(settings)
    for prefix, data in ((FLOORS, given.floors), (STEP, given.step)):
        if data:
            raise FuseError(f"--set {prefix}{next(iter(data))}: a recorded run has its own; allowed without --from")
    return read_block(SimulationOptions, given.options, "options")


def read_settings(settings: list[str]) -> Given:
    """Read KEY=VALUE pairs, values as YAML."""
    data: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals:
            raise FuseError(f"--set {setting!r}: needs KEY=VALUE")
        try:
            data[key] = _number(value)
        except yaml.YAMLError as error:
            raise FuseError(f"--set {setting!r}: the value is not YAML") from error
    for key in data:
        if key in Workload.__dataclass_fields__ and key not in SimulationOptions.__dataclass_fields__:
            raise FuseError(f"--set {key}: a key of the step: --set {STEP}{key}=...")
    floors, step = (
        {key.removeprefix(prefix): data.pop(key) for key in list(data) if key.startswith(prefix)}
        for prefix in (FLOORS, STEP)
    )
    return Given(data, floors, step)


def _number(text: str) -> Any:
    """Return a value as YAML, and a number as people write it: to YAML 2e-5 is text."""
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def recorded_acceptance(run_dir: Path) -> float:
    """Return the chance that a drafted token is accepted once the tokens before it are, in the steps of a run that
    speculated."""
    folder, _ = located(run_dir)
    found = [data for _, data in read_metrics(folder / METRICS_FILE) if data.get(DRAFTED_METRIC)]
    if not found:
        raise FuseError(
            f"{folder / METRICS_FILE}: no step has {DRAFTED_METRIC}; needs a run with fuse.speculation.enabled=true"
        )
    drafted, accepted, passes = (
        sum(value(data) for data in found)
        for value in (
            lambda data: data[DRAFTED_METRIC],
            lambda data: data[DRAFTED_METRIC] * data[ACCEPTANCE_METRIC],
            # The passes of each sample are summed up: each brings one token beside the accepted tokens.
            lambda data: (
                data[DRAFTED_METRIC] * data[ACCEPTANCE_METRIC] / (data[TOKENS_METRIC] - 1)
                if data[TOKENS_METRIC] > 1
                else 0.0
            ),
        )
    )
    return acceptance_of(1 + accepted / passes, accepted / drafted) if accepted else 0.0


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
    for row in rows:
        for note in _notes(row):
            say(f"{row.strategy}: {note}")
    for call in rows[0].example.plan.calls:
        say(f"stock places {call.call} as {call.layout} with {call.microbatches} micro-batches")


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
    return f"{name}: steps are {ratio:.2f} times as fast as {base.strategy}'s [{low:.2f}, {high:.2f}]{faulty}"


def _widths_data(widths: Mapping[int, tuple[CallPlan, float]]) -> list[dict[str, Any]]:
    return [
        {"tp": tp, "layout": str(plan.layout), "generation_seconds": seconds} for tp, (plan, seconds) in widths.items()
    ]


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


def _advised_data(advice: Advice, row: StrategyResult) -> dict[str, Any]:
    estimates = {"seconds": dataclasses.asdict(row.seconds), "speedup": dataclasses.asdict(row.speedup)}
    return {"advice": dataclasses.asdict(advice), "advised": {"strategy": row.strategy, **estimates}}


def write_timelines(
    folder: Path, rows: list[StrategyResult], title: str, verdict: str, origin: str
) -> list[Path | None]:
    """Write one run folder per strategy, like the folder of a recorded run, and a page that shows all strategies;
    return the page first."""
    pages, strategies = [], []
    for row in rows:
        # A link may not begin with a word and a colon.
        run = folder / row.strategy.replace(":", ".")
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
    try:
        write_atomically(together, strategies_page(title, verdict, origin, strategies))
    except OSError as error:
        raise FuseError(f"{together}: cannot be written: {reason(error)}") from error
    return [together, *pages]


def show_replay(run: Path, options: SimulationOptions, as_json: bool) -> None:
    """Print the savings table of a recorded run."""
    config = find_config(located(run)[0])
    features = features_of_run(config)
    name, result, options = replayed(located(run)[0], options, features)
    on = features_on(config, features, result)
    open_ = open_features(features, refusals_of(config, features), idle_in(config, features), on)
    advice = advice_of_replay(result, features, excluded(config), open_)
    if as_json:
        print_json(
            {
                "run": name,
                "steps": result.steps,
                "step_seconds": result.seconds,
                "replay_error": result.replay_error,
                "savings": [
                    {"feature": name, **dataclasses.asdict(saving)} for name, saving in all_savings(result).items()
                ],
                "advice": dataclasses.asdict(advice),
            }
        )
        return
    title = f"{escape(name)}: {result.steps} steps, {result.seconds:.2f} s each"
    rows = (
        (name, s.seconds if s.known else None, s.seconds / result.seconds, s.device_share, escape(s.note))
        for name, s in all_savings(result).items()
    )
    print_table(features_table(title, "how", rows))
    say(f"Generation replayed from fitted decode times: median error {result.replay_error:.0%}.")
    if options.dedicated is None:
        say(
            "Replicas are taken to have devices of their own; where they share saturated ones, as on a CPU, say --set "
            "dedicated=false."
        )
    show_advice(advice)


def features_of_run(config: DictConfig | None) -> dict[str, Feature]:
    """Return the features that a run had plugins for; all of them where its configuration was not kept."""
    disabled = () if config is None else select(config, "fuse.disabled_plugins") or ()
    return plugins.features(plugins.load(disabled))


def all_savings(result: Replay) -> dict[str, Saving]:
    """Return the saving of observe mode, and of each feature."""
    return {"observe": result.observed, **result.savings}


def replayed(
    run_dir: Path, options: SimulationOptions, features: Mapping[str, Feature]
) -> tuple[str, Replay, SimulationOptions]:
    """Return the name of a recorded run, its steps replayed, and the options that follow from the run's configuration;
    the first step, which warms up, is left out where there are other steps."""
    numbers = recorded_steps(run_dir)
    config = find_config(run_dir)
    accelerator = options.dedicated is not False if config is None else on_accelerators(getter(config))
    if options.dedicated is None and not accelerator:
        # All processes share the cores.
        options = dataclasses.replace(options, dedicated=False)
    with ProgressNotes(f"reading {len(numbers)} recorded steps") as report:
        timelines = list(readable_steps(run_dir, numbers[1:] or numbers))
        report(f"replaying {len(timelines)} recorded steps")
        steps = [read_recorded(timeline) for timeline in timelines]
        savings = {name: feature.saving for name, feature in features.items() if feature.saving}
        mini_batches = {} if config is None else mini_batches_of(getter(config))
        found = replay(steps, options, savings, features_on(config, features), accelerator, mini_batches)
        return timelines[-1].run, found, options


def features_on(config: DictConfig | None, features: Mapping[str, Feature], result: Replay | None = None) -> list[str]:
    """Return the features that the run had on, by its configuration or by its steps."""
    shown = {name for name, saving in result.savings.items() if saving.on} if result else set[str]()
    return [
        name
        for name, one in features.items()
        if name in shown or (config is not None and all(_set(config, override) for override in one.overrides))
    ]


def _set(config: DictConfig, override: str) -> bool:
    key, _, value = override.partition("=")
    return select(config, key) == yaml.safe_load(value)


def mini_batches_of(get: Get) -> dict[str, int]:
    """Return the mini-batches of a step, by model."""
    prompts, blocks = get("data.train_batch_size"), {"actor": ACTOR, "critic": CRITIC}
    sizes = {model: get(f"{block}.ppo_mini_batch_size") for model, block in blocks.items()}
    return {model: max(1, prompts // size) for model, size in sizes.items() if prompts and size}


def _is_as_good(preset: Mapping[str, str], rows: Sequence[StrategyResult], advised: StrategyResult) -> bool:
    """Tell whether the row of the preset is as fast as what is advised."""
    near = (1 + LEAST_GAIN_SHARE) * advised.seconds.mean
    return any(row.strategy in preset and row.seconds.mean <= near for row in rows)


def show_advice(advice: Advice, preset: Sequence[str] = ()) -> None:
    """Print the features to switch on, and the lines that switch them on: those of a `preset` where it does as much."""
    say(_verdict(advice))
    if preset:
        typer.echo(f"Paste: {' '.join(preset)}")
    elif advice.features:
        typer.echo("Overrides to paste:\n  " + " \\\n  ".join(advice.overrides))


def _verdict(advice: Advice) -> str:
    return f"Verdict: {advice.sentence}."


def features_table(title: str, remark: str, rows: Iterable[tuple[str, float | None, float, float, str]]) -> Table:
    """Return a table with the columns feature, seconds a step (None: unknown), share of the step, share of device time,
    and `remark`."""
    table = Table(
        "feature", *numbers("s a step", "of the step", "device time"), remark, title=title, title_justify="left"
    )
    for feature, seconds, share, device_share, note in rows:
        device = f"-{device_share:.0%}" if device_share else ""
        known = ("unknown", "") if seconds is None else (f"{seconds:.2f}", f"{share:.1%}")
        table.add_row(feature, *known, device, note)
    return table
