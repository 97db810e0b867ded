"""Replays a recorded run with each feature, for `verl-fuse simulate --from` and `advise`, and prints the savings."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer
import yaml
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from verl_fuse import plugins
from verl_fuse.advice import Advice, advice_of_replay
from verl_fuse.cli.composition import select
from verl_fuse.cli.output import print_json
from verl_fuse.cli.progress import ProgressNotes
from verl_fuse.cli.prose import say
from verl_fuse.cli.refused import Refusals, idle_in
from verl_fuse.cli.report import read_metrics
from verl_fuse.cli.tables import numbers, print_table
from verl_fuse.compare.run import METRICS_FILE
from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature
from verl_fuse.simulate.drafts import acceptance_of
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.recorded import Replay, read_recorded, replay
from verl_fuse.spec.composed import ACTOR, CRITIC, Get, getter, on_accelerators
from verl_fuse.spec.run_config import find_config
from verl_fuse.timeline.files import located, readable_steps, recorded_steps

# These are the counts of fuse.speculation in the metrics file.
DRAFTED_METRIC, ACCEPTANCE_METRIC, TOKENS_METRIC = (
    f"fuse/speculation_{name}" for name in ("drafted_tokens", "acceptance", "tokens_per_pass")
)


@dataclass(frozen=True)
class ReplayedRun:
    """A recorded run of this folder and name, replayed; its configuration (None: it was not kept), the `features` that
    it had plugins for, those that were `on`, and of each what refuses it and why it is `idle`; the advice on those that
    it could have had on beside these, and what refuses all of it together. `dedicated` is the option, as far as the
    configuration tells it."""

    folder: Path
    name: str
    config: DictConfig | None
    features: Mapping[str, Feature]
    result: Replay
    on: Sequence[str]
    refusals: Mapping[str, Sequence[str]]
    idle: Mapping[str, str]
    advice: Advice
    advice_refused: Sequence[str]
    dedicated: bool | None

    @property
    def title(self) -> str:
        return f"{escape(self.name)}: {self.result.described}, {self.result.seconds:.2f} s"


def show_replay(path: Path, options: SimulationOptions, as_json: bool) -> None:
    """Print the savings table of a recorded run."""
    run = replayed(path, options)
    result, advice, savings = run.result, run.advice, {"observe": run.result.observed, **run.result.savings}
    if as_json:
        print_json(
            {
                "run": run.name,
                "steps": result.steps,
                "step_seconds": result.seconds,
                "replay_error": result.replay_error,
                "savings": [{"feature": name, **dataclasses.asdict(saving)} for name, saving in savings.items()],
                "advice": dataclasses.asdict(advice),
            }
        )
        return
    rows = (
        (name, s.seconds if s.known else None, s.seconds / result.seconds, s.device_share, escape(s.note))
        for name, s in savings.items()
    )
    print_table(features_table(run.title, "how", rows))
    say(f"Generation replayed from fitted decode times: median error {result.replay_error:.0%}.")
    if run.dedicated is None:
        say(
            "Replicas are taken to have devices of their own; where they share saturated ones, as on a CPU, say --set "
            "dedicated=false."
        )
    show_advice(advice)


def replayed(path: Path, options: SimulationOptions) -> ReplayedRun:
    """Replay the steps of a run's folder, or of a page in it, with each feature; the first step, which warms up, is
    left out where there are other steps."""
    run_dir, _ = located(path)
    config = find_config(run_dir)
    disabled = () if config is None else select(config, "fuse.disabled_plugins") or ()
    features = plugins.features(plugins.load(disabled))
    numbers = recorded_steps(run_dir)
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
        result = replay(steps, options, savings, features_on(config, features), accelerator, mini_batches)
    on = features_on(config, features, result)
    checks, idle = Refusals(config), idle_in(config, features)
    refusals = checks.of(features)
    open_ = {name for name in features if not (refusals[name] or name in idle or name in on)}
    advice = advice_of_replay(result, features, checks.together, open_)
    together = checks.beside(tuple(advice.overrides))
    return ReplayedRun(
        run_dir, timelines[-1].run, config, features, result, on, refusals, idle, advice, together, options.dedicated
    )


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


def show_advice(advice: Advice, preset: Sequence[str] = ()) -> None:
    """Print the features to switch on, and the lines that switch them on: those of a `preset` where it does as much."""
    say(verdict_of(advice))
    if preset:
        typer.echo(f"Paste: {' '.join(preset)}")
    elif advice.features:
        typer.echo("Overrides to paste:\n  " + " \\\n  ".join(advice.overrides))


def verdict_of(advice: Advice) -> str:
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


def recorded_acceptance(run_dir: Path) -> float:
    """Return the chance that a drafted token is accepted once the tokens before it are, in the steps of a run that
    speculated."""
    folder, _ = located(run_dir)
    found = [data for _, data in read_metrics(folder / METRICS_FILE) if data.get(DRAFTED_METRIC)]
    if not found:
        raise FuseError(
            f"{folder / METRICS_FILE}: no step has {DRAFTED_METRIC}; needs a run with fuse.speculation.enabled=true"
        )
    drafted = sum(data[DRAFTED_METRIC] for data in found)
    of_steps = [(data[DRAFTED_METRIC] * data[ACCEPTANCE_METRIC], data[TOKENS_METRIC]) for data in found]
    accepted = sum(taken for taken, _ in of_steps)
    # The passes of each sample are summed up: each brings one token beside the accepted tokens.
    passes = sum(taken / (tokens - 1) for taken, tokens in of_steps if tokens > 1)
    return acceptance_of(1 + accepted / passes, accepted / drafted) if accepted else 0.0
