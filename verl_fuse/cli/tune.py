"""`verl-fuse tune NAME` or `tune -- ARGUMENTS`: finds verl's own exact settings for a recipe or a run of stock verl, by
short trials of real steps."""

import math
import os
import re
import shlex
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Column, Table

from verl_fuse import plugins
from verl_fuse.cli import interrupt, trials
from verl_fuse.cli.check import PRESET
from verl_fuse.cli.foreseen import NOTHING, Foreseen, predictor
from verl_fuse.cli.locked import alone
from verl_fuse.cli.output import Json, examples, note, print_json
from verl_fuse.cli.prose import say
from verl_fuse.cli.recipes import find_recipe
from verl_fuse.cli.run import PlannedRun, home_from
from verl_fuse.cli.tables import print_table
from verl_fuse.cli.tuned import (
    Base,
    are_arguments,
    base_of_arguments,
    base_of_recipe,
    beginning_at,
    features_of,
    switched_on,
)
from verl_fuse.compare.intervals import Interval, mean
from verl_fuse.compare.verdict import interval_text
from verl_fuse.errors import FuseError
from verl_fuse.feature import SWITCH
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.start.resumption import named_cluster
from verl_fuse.host.switch import require_on
from verl_fuse.spec.block import key_of
from verl_fuse.spec.composed import getter
from verl_fuse.tune.answer import Answer, answer
from verl_fuse.tune.predicted import KEYS
from verl_fuse.tune.search import Request, Search
from verl_fuse.tune.trial import Outcome, Overrides, Trial
from verl_fuse.tune.wanted import COLUMNS, check, columns, wanted

app = typer.Typer(add_completion=False)

# Minutes that two trials of a small model take.
LEAST_BUDGET = 2.0
# The part of what is left after the base's trial that a profile of the machine may take.
PART = 0.2
# Seconds in which a small model is measured.
LEAST_PROFILE = 10.0
_OF_FUSE = re.compile(r"[+~]*fuse\b")
_NO_FEATURES = "trials begin in observe mode, without features: leave it out; --with-features tries those that pay"


@app.command(
    epilog=examples(
        "verl-fuse tune grpo-cpu --budget 15",
        "verl-fuse tune ppo-cpu actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 --steps 4 --json",
        "verl-fuse tune ppo-cpu --keys actor_rollout_ref.rollout.max_num_seqs --allow ends_resume",
        "verl-fuse tune grpo-cpu --with-features --budget 30",
        "verl-fuse tune --budget 60 -- algorithm.adv_estimator=grpo data.train_files=train.parquet",
    )
)
def tune(
    name: Annotated[
        str, typer.Argument(help="Name of the recipe (verl-fuse recipes), or -- and main_ppo's arguments.")
    ],
    overrides: Annotated[list[str] | None, typer.Argument(help="Hydra overrides, as verl takes them.")] = None,
    budget: Annotated[float, typer.Option(metavar="MINUTES", help="No trial begins that would end later.")] = 15.0,
    allow: Annotated[
        list[str] | None,
        typer.Option(metavar="COST", help="Try also what cuts_mini_batches anew, or ends_resume (again for both)."),
    ] = None,
    keys: Annotated[list[str] | None, typer.Option(metavar="KEY", help="Try this key alone (again for more).")] = None,
    with_features: Annotated[
        bool, typer.Option("--with-features", help="Try also the features that fuse.preset=fast would switch on.")
    ] = False,
    steps: Annotated[
        int, typer.Option(min=2, help="Steps of a trial after one of warm-up; the finals take 2 to 4 times as many.")
    ] = 3,
    checkpoint: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Begin trials with the weights of this global_step_N, which is only read."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Find faster settings of verl itself that train the same, by short trials of real steps of a recipe or, behind --,
    of a run of stock verl.

    The base comes first, then one change at a time; what is faster is kept. The finalists and the base are measured
    again, in turn. Trials are in the folders NAME-tune/trial-NN, for arguments main_ppo-tune/trial-NN; the run's own
    folder is left as it is. Ctrl-C ends the search with the best so far.
    """
    begun = time.monotonic()
    require_version()
    require_on("a trial needs the timeline of observe mode")
    base, home = _base(name, overrides or []), home_from(os.environ)
    if checkpoint is not None:
        if "ends_resume" in (allow or []):
            raise FuseError("--allow ends_resume: not with --checkpoint, which its values cannot read")
        base = beginning_at(base, checkpoint)
    first = check_request(base, budget, keys or [], allow or [], steps, with_features)
    folder = trials.folder_of(base, home)

    def trial(asked: Request) -> Outcome:
        number = len(search.trials) + 1
        how = ", replayed" if asked.replayed else ", recorded" if asked.records else ""
        note(f"trial {number}{how}: {' '.join(asked.overrides) or 'the base'}")
        beyond = too_large(predicted(), search.trials, asked.overrides) if asked.overrides else None
        found = beyond or trials.made(base, home, number, asked)
        note(f"trial {number}: {_result(found)}")
        return found

    @cache
    def candidates(changes: Overrides):
        features = features_of(base, changes) if with_features else ()
        return (*wanted(base.compose(changes), keys or [], allow or []), *features)

    @cache
    def dependents(changes: Overrides):
        return wanted(base.compose(changes), [], allow or [])

    def later() -> list[tuple[Path, Trial]]:
        made = enumerate(search.trials[1:], start=2)
        # Finals may repeat other rollouts.
        return [(folder / f"trial-{number:02d}", trial) for number, trial in made if trial.measured and not trial.turn]

    @cache
    def predicted() -> Foreseen:
        if not any(each.setting.key in KEYS for each in candidates(())):
            return NOTHING
        left, spent = 60 * budget - (time.monotonic() - begun), trials.spent_recording(base, home, steps)
        # A trial, and the base beside it, come first.
        limit = min(PART * left, left - 3 * search.trials[0].took)
        if limit < LEAST_PROFILE:
            note("nothing is predicted of trials: --budget has no room for a profile of this machine")
            return NOTHING
        return predictor(base.compose(()), folder / "trial-01", sum(spent) / len(spent), limit, later)

    with alone(folder, "verl-fuse tune makes trials", trials.ELSEWHERE):
        if first.prepare is not None:
            note("the task is made, if it is not there yet")
            trials.make_task(first)
        search = Search(
            candidates,
            trial,
            steps=steps,
            budget=60 * budget,
            replays=lambda number: trials.has_recorded(base, home, number),
            dependents=dependents,
            ratio=lambda one, other, replayed: predicted().ratio(one, other, replayed),
        )
        trials.forget_trials(base, home)
        try:
            search.run()
        finally:
            trials.forget_rollouts(base, home)
    if not search.trials:
        raise typer.Exit(interrupt.CODE)
    if not search.trials[0].measured:
        note(f"the base's own trial: {_result(search.trials[0].outcome)} (log: {folder}/trial-01)")
        raise typer.Exit(1)
    found, minutes = answer(search.trials, interrupted=search.interrupted), (time.monotonic() - begun) / 60
    found = replace(found, overrides=switched_on(base, found.overrides))
    if len(search.trials) == 1 and not search.interrupted:
        took = search.trials[0].took / 60
        note(f"--budget {budget:g} has no room for a second trial: the base's took {took:.1f} minutes")
    if KEYS & set(map(key_of, found.overrides)) and not _knows_memory(predicted(), search.trials):
        note("whether memory lasts at the longest prompts and responses is not known: keep perf/max_memory_* in view")
    if as_json:
        print_json(as_dict(found, search.trials, minutes))
    else:
        _show(found, search.trials, minutes)


def too_large(known: Foreseen, made: Sequence[Trial], overrides: Overrides) -> Outcome | None:
    """Return the outcome of a trial whose memory would not last at the longest prompts and responses, however short its
    own are; None where it would, where nothing is known, or where the base itself would need as much."""
    if not _knows_memory(known, made):
        return None
    peak, more, of_base = made[0].outcome.peak_bytes or 0, known.more_at_limits(overrides), known.more_at_limits(())
    if more is None or peak + more <= max(known.memory, peak + (of_base or 0.0)):
        return None
    needs, has = (f"{size / 2**30:.1f}" for size in (peak + more, known.memory))
    why = f"a rank would need {needs} GiB at the longest prompts and responses, and has {has}"
    return Outcome("out_of_memory", reason=f"predicted, not tried: {why}")


def _knows_memory(known: Foreseen, made: Sequence[Trial]) -> bool:
    """Tell whether memory at the longest prompts and responses can be told from what the base's trial needed."""
    return made[0].outcome.peak_bytes is not None and known.more_at_limits(()) is not None


def _base(name: str, overrides: list[str]) -> Base:
    """Return the base that the command line names; features are refused."""
    words = [name, *overrides]
    if features := [word for word in words if _OF_FUSE.match(word) and word != SWITCH[0]]:
        raise FuseError(*(f"{word}: {_NO_FEATURES}" for word in features))
    return base_of_arguments(words) if are_arguments(words) else base_of_recipe(find_recipe(name), overrides)


def check_request(
    base: Base, budget: float, keys: Sequence[str], allow: Sequence[str], steps: int, with_features: bool = False
) -> PlannedRun:
    """Return the base's trial as planned. What cannot be served is refused before anything starts, by a FuseError that
    names it and what is allowed."""
    if not LEAST_BUDGET <= budget < math.inf:
        raise FuseError(f"--budget {budget:g}: needs {LEAST_BUDGET:g} minutes at least, for two trials")
    config = base.compose(())
    switches = [f"fuse.{feature.switch}" for feature in plugins.features(plugins.load()).values()]
    if on := [switch for switch in switches if getter(config)(switch)]:
        raise FuseError(*(f"{switch}=true: {_NO_FEATURES}" for switch in on))
    # The trainer of a cluster has neither the variables of a trial nor, it may be, its disk.
    if cluster := named_cluster(getter(config)):
        raise FuseError(f"{cluster}: trials need a Ray of their own: leave it out, or RAY_ADDRESS=local")
    chosen = features_of(base, ()) if with_features else ()
    check(config, keys, allow, chosen)
    if with_features and not chosen:
        why = "verl-fuse check says why, and what would unlock more"
        raise FuseError(f"--with-features: fuse.preset={PRESET} switches nothing on in this run: {why}")
    trials.check_disk(base, home_from(os.environ), steps)
    return trials.planned(base, home_from(os.environ), 1, Request((), steps, math.inf, records=True))


def as_dict(found: Answer, made: Sequence[Trial], minutes: float) -> dict[str, Any]:
    """Return everything for JSON: seconds a step, intervals as [low, high], ratios as times as fast
    as the base."""

    def ends(interval: Interval) -> list[float | None]:
        return [interval.low, interval.high]

    return {
        "verdict": found.verdict,
        "base": {"seconds": found.base.value, "interval": ends(found.base)},
        "best": {
            "overrides": found.overrides,
            "seconds": found.best.value,
            "interval": ends(found.best),
            "ratio": found.ratio.value,
            "ratio_interval": ends(found.ratio),
        },
        "trials": [
            {
                "overrides": trial.overrides,
                "replayed": trial.replayed,
                "final": bool(trial.turn),
                "predicted_seconds": trial.predicted,
                "seconds": trial.mean if trial.measured else None,
                "outcome": trial.outcome.kind,
                "reason": trial.outcome.reason,
                "peak_bytes": trial.outcome.peak_bytes,
            }
            for trial in made
        ],
        "minutes": minutes,
    }


def _show(found: Answer, made: Sequence[Trial], minutes: float) -> None:
    table = Table(Column("trial", justify="right"), "changes", "predicted", "seconds a step", "costs")
    for number, trial in enumerate(made, start=1):
        costs = {column for override in trial.overrides for column in columns(key_of(override))}
        listed = (column.replace("_", " ") for column in COLUMNS if column in costs)
        label = f"{number}{', final' if trial.turn else ''}{', replayed' if trial.replayed else ''}"
        changes = escape("\n".join(trial.overrides)) or "the base"
        predicted = "" if trial.predicted is None else f"{trial.predicted:.2f}"
        table.add_row(label, changes, predicted, escape(_result(trial.outcome)), ", ".join(listed))
    print_table(table)
    typer.echo(
        f"{len(made)} trials in {minutes:.1f} minutes; seconds with their 95 % interval. The verdict compares live "
        "trials at equal lengths of their responses."
    )
    if found.overrides:
        typer.echo("Overrides to paste:\n  " + " \\\n  ".join(map(shlex.quote, found.overrides)))
    say(f"Verdict: {found.verdict}.")


def _result(outcome: Outcome) -> str:
    if outcome.kind != "measured":
        return f"{outcome.kind.replace('_', ' ')}: {outcome.reason}"
    return f"{interval_text(mean(outcome.seconds))} s a step"
