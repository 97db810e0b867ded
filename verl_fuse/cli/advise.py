"""`verl-fuse advise RUN_DIR`: tells which features would have paid on a run already made, and how to switch them on."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from omegaconf import DictConfig
from rich.markup import escape
from rich.table import Table

from verl_fuse.advice import Advice, Gain, advice_of_replay, gains_of_replay, not_predicted
from verl_fuse.cli.advised_settings import advised_settings, as_data, measured_peak, show_settings
from verl_fuse.cli.assumed import read_options
from verl_fuse.cli.cluster_argument import CLUSTER_HELP, read_cluster
from verl_fuse.cli.output import Json, examples, print_json
from verl_fuse.cli.prose import say
from verl_fuse.cli.refused import excluded, idle_in, open_features, refusals_of, refused, refused_beside
from verl_fuse.cli.replay import features_of_run, features_on, features_table, replayed, show_advice
from verl_fuse.cli.tables import print_table
from verl_fuse.cost.profiled import cost_model
from verl_fuse.errors import FuseError, listed
from verl_fuse.simulate.recorded import Replay
from verl_fuse.spec.run_config import FILE, find_config
from verl_fuse.timeline.files import located

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
    run_dir, _ = located(run_dir)
    config = find_config(run_dir)
    features = features_of_run(config)
    run, result, options = replayed(run_dir, read_options(set_ or []), features)
    gains = gains_of_replay(result, features)
    refusals, idle = refusals_of(config, features), idle_in(config, features)
    on = features_on(config, features, result)
    advice = advice_of_replay(result, features, excluded(config), open_features(features, refusals, idle, on))
    others = not_predicted(result, features)
    notes = notes_of(result, config, options.dedicated, advice)
    cost = None if cluster is None else cost_model(read_cluster(cluster), profile)
    settings = [] if config is None else advised_settings(config, result, cost, on)
    if settings and on:
        notes.append(f"nothing is predicted of verl's settings in a run with features ({', '.join(on)})")
    peak, after = measured_peak(run_dir), result.seconds - advice.saved
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
                "on": on,
                "refused": refusals,
                "idle": idle,
                "settings": as_data(settings),
                "peak_bytes": peak,
            }
        )
        return
    state = partial(
        _state, refusals=refusals, idle=idle, on=on, predicted=[gain.feature for gain in gains], advice=advice
    )
    title = f"{escape(run)}: {result.described}, {result.seconds:.2f} s"
    print_table(_table(gains, others, title, state))
    for name, note in {**{gain.feature: gain.note for gain in gains}, **others}.items():
        why = idle.get(name) or (f"refused: {listed(refusals[name])}" if refusals[name] else note)
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


def notes_of(result: Replay, config: DictConfig | None, dedicated: bool | None, advice: Advice) -> list[str]:
    """Return notes that a reader needs before the advice is believed."""
    found = []
    if result.replay_error > TRUSTED:
        found.append(
            f"the replayed generation misses the recorded one by {result.replay_error:.0%} (median): the figures say "
            "little"
        )
    if config is None:
        found.append(
            f"the run's configuration was not kept ({FILE}): what refuses a feature is not checked, a feature that "
            "leaves no trace may have been on, and no setting of verl's is named, with --cluster neither"
        )
    else:
        if beside := refused_beside(config, advice.overrides, refused(config, ())):
            found.append(f"all of the advice together is refused: {listed(beside)}")
    if dedicated is None:
        found.append(
            "replicas are taken to have devices of their own; where they share saturated ones, as on a CPU, say --set "
            "dedicated=false"
        )
    return found


def _state(
    name: str,
    refusals: Mapping[str, Sequence[str]],
    idle: Mapping[str, str],
    on: Sequence[str],
    predicted: Sequence[str],
    advice: Advice,
) -> str:
    if name in on:
        return "is on"
    if name in idle:
        return "no work"
    if refusals[name]:
        return "refused"
    return "switch on" if name in advice.features else "leave off" if name in predicted else "measure it"


def _table(gains: Sequence[Gain], others: Iterable[str], title: str, state: Callable[[str], str]) -> Table:
    rows = ((gain.feature, gain.seconds, gain.share, gain.device_share, state(gain.feature)) for gain in gains)
    table = features_table(title, "advice", rows)
    for name in others:
        table.add_row(name, "unknown", "", "", state(name))
    return table
