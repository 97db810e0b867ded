"""`verl-fuse advise RUN_DIR`: tells which features would have paid on a run already made, and how to switch them on."""

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from verl_fuse.advice import gains_of_replay, not_predicted
from verl_fuse.cli.advised_settings import advised_settings, as_data, show_settings
from verl_fuse.cli.assumed import read_options
from verl_fuse.cli.cluster_argument import CLUSTER_HELP, read_cluster
from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.prose import say
from verl_fuse.cli.replay import ReplayedRun, features_table, replayed, show_advice
from verl_fuse.cli.report import logged
from verl_fuse.cli.tables import print_table
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError, listed
from verl_fuse.spec.run_config import FILE

app = typer.Typer(add_completion=False)

# A replay that misses the recorded generation by a larger share says little about a feature.
TRUSTED = 0.2


@app.command(
    name="advise", epilog=examples("verl-fuse advise runs/ppo-cpu", "verl-fuse advise runs/ppo --cluster h100x2 --json")
)
def command(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="Directory of a run in observe mode, or a page in it.")
    ],
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="An option of the replay, as of `simulate --from`."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(metavar="CLUSTER", help=f"The run's devices, for seconds of verl's settings. {CLUSTER_HELP}"),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="A profile of these devices, written by `verl-fuse profile`.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say which features would have made the steps of a recorded run shorter, what refuses them, and what to paste.

    The run's steps are replayed with each feature (`simulate --from`), and the run's own
    configuration is checked with it. Settings of verl itself that train the same are named too.
    """
    if profile is not None and cluster is None:
        raise FuseError(f"--profile {profile}: needs --cluster, which names the run's devices")
    run = replayed(run_dir, read_options(set_ or []))
    result, advice = run.result, run.advice
    gains, others = gains_of_replay(result, run.features), not_predicted(result, run.features)
    notes = notes_of(run)
    cost = None if cluster is None else cost_model(read_cluster(cluster), profile)
    settings = [] if run.config is None else advised_settings(run.config, result, cost, run.on)
    if settings and run.on:
        notes.append(f"nothing is predicted of verl's settings in a run with features ({', '.join(run.on)})")
    peak, after = logged(run.folder).peak_bytes, result.seconds - advice.saved
    if as_json:
        print_json(
            {
                "verdict": advice.sentence,
                "features": advice.features,
                "overrides": advice.overrides,
                "advised": {"seconds": after, "speedup": result.seconds / after, "at_most": advice.at_most},
                "notes": notes,
                "steps": result.steps,
                "step_seconds": result.seconds,
                "replay_error": result.replay_error,
                "gains": [dataclasses.asdict(gain) for gain in gains],
                "not_predicted": others,
                "on": run.on,
                "refused": run.refusals,
                "idle": run.idle,
                "settings": as_data(settings),
                "peak_bytes": peak,
            }
        )
        return
    rows = (
        (gain.feature, gain.seconds, gain.share, gain.device_share, _state(gain.feature, run, "leave off"))
        for gain in gains
    )
    unknown = ((name, None, 0.0, 0.0, _state(name, run, "measure it")) for name in others)
    print_table(features_table(run.title, "advice", [*rows, *unknown]))
    for name, note in {**{gain.feature: gain.note for gain in gains}, **others}.items():
        why = run.idle.get(name) or (f"refused: {listed(run.refusals[name])}" if run.refusals[name] else note)
        for line in f"{name}: {why}".splitlines():
            say(line)
    show_settings(settings, result.seconds, peak)
    for note in notes:
        for line in f"Note: {note}".splitlines():
            say(line)
    if result.replay_error > TRUSTED and advice.features:
        say(f"Verdict: not sure, the replay is that far off: measure with `verl-fuse ab`. It says: {advice.sentence}.")
    else:
        show_advice(advice)


def notes_of(run: ReplayedRun) -> list[str]:
    """Return notes that a reader needs before the advice is believed."""
    found = []
    if run.result.replay_error > TRUSTED:
        found.append(
            f"the replayed generation misses the recorded one by {run.result.replay_error:.0%} (median): the figures "
            "say little"
        )
    if run.config is None:
        found.append(
            f"the run's configuration was not kept ({FILE}): what refuses a feature is not checked, a feature that "
            "leaves no trace may have been on, and no setting of verl's is named, with --cluster neither"
        )
    elif run.advice_refused:
        found.append(f"all of the advice together is refused: {listed(run.advice_refused)}")
    if run.dedicated is None:
        found.append(
            "replicas are taken to have devices of their own; where they share saturated ones, as on a CPU, say --set "
            "dedicated=false"
        )
    return found


def _state(name: str, run: ReplayedRun, otherwise: str) -> str:
    if name in run.on:
        return "is on"
    if name in run.idle:
        return "no work"
    if run.refusals[name]:
        return "refused"
    return "switch on" if name in run.advice.features else otherwise
