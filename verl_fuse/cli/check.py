"""`verl-fuse check -- ARGUMENTS`: tells what `fuse.preset=fast`, or `safe` where the arguments have it, does for a run
of verl, without running anything."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.composition import near_key, no_such_key
from verl_fuse.cli.launch import PRESET_KEY, Run, read_run
from verl_fuse.cli.output import Json, examples, note, print_json
from verl_fuse.cli.prose import say
from verl_fuse.cli.refused import refused
from verl_fuse.cli.report import LOGGER_KEY
from verl_fuse.cli.shell import shown
from verl_fuse.compare.run import METRICS_FILE, METRICS_PATH_VARIABLE
from verl_fuse.errors import FuseError
from verl_fuse.feature import SWITCH, PresetName
from verl_fuse.host.names import TRAINER_MODE
from verl_fuse.host.start.compat.start import require_version
from verl_fuse.host.start.preset import Choice
from verl_fuse.host.start.settings import foreseen, main_refusals, unlocking
from verl_fuse.host.switch import VARIABLE, switched_off
from verl_fuse.host.upstream.versions import installed
from verl_fuse.spec.block import key_of, nearest, quoted, written
from verl_fuse.spec.composed import ROLLOUT, getter

app = typer.Typer(add_completion=False)

PRESET: PresetName = "fast"
MODE, PLAN_KEY = "trainer.v1.trainer_mode", "fuse.plan"
# Modes in which the run is synchronous; verl's others train on samples of older weights.
_SYNCHRONOUS = (None, "sync", TRAINER_MODE)
# Ends of keys that tell the sizes of batches and how they are spread.
_OF_BATCHES = ("_size", "_per_gpu", "_per_node", ".nnodes", ".n", "use_dynamic_bsz")
# Ends of keys of where, by which engine and by which kernels something is computed: other values train the same, up to
# rounding. Any other key is part of what is trained.
_SAME_TRAINING = (
    *("strategy", "_parallel_size", "_parallel", "fsdp_size", "use_megatron_fsdp", "use_fused_kernels", "use_liger"),
    *("rollout.name", "free_cache_engine", "full_determinism", "router_config_path", "disaggregation.enabled"),
)


@app.command(
    epilog=examples(
        "verl-fuse check -- algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=8 data.train_batch_size=256",
        "verl-fuse check --script run_grpo.sh --json",
        "verl-fuse check --script config.yaml -- trainer.nnodes=2",
    )
)
def check(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- ARGUMENTS]", help="Arguments of verl.trainer.main_ppo, or of the script."),
    ] = None,
    script: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A shell script that starts main_ppo, or a YAML file: read, never run."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what fuse.preset=fast switches on in a run of verl, what not and why, and what would unlock more.

    Arguments with fuse.preset=safe are answered for safe.
    It needs verl's files, and neither Ray, nor a GPU, nor the run's model and data. Keys that this verl does not have
    are named and left out. The exit code is 0 also where nothing can be switched on, or the run is refused (problems
    of --json).
    """
    if script is None and not arguments:
        raise FuseError("check needs arguments of verl.trainer.main_ppo behind --, or --script FILE")
    if script is None and arguments and os.path.isfile(arguments[0]):
        raise FuseError(f"{arguments[0]} is a file: give it as --script {arguments[0]}")
    require_version()
    run = read_run(arguments or [], script)
    asked, wrong = OmegaConf.select(run.config, PRESET_KEY, default=None), wrong_preset(run.config)
    preset = with_preset(run)
    run.faulty |= wrong
    choices = foreseen(run.config, preset)
    report = _report(run, preset, choices, (arguments or ()) if script is not None else ())
    if asked == "observe" and any(key_of(argument) == PRESET_KEY for argument in run.arguments):
        run.notes.append(f"{PRESET_KEY}=observe switches nothing on; the answer is {preset}'s")
    rollout = OmegaConf.select(run.config, ROLLOUT, default=None)
    if rollout is not None and OmegaConf.is_missing(rollout, "name") and not run.own_program:
        run.notes.append(f"{ROLLOUT}.name is not given, and verl has no default: such a run ends at its start")
    mode = OmegaConf.select(run.config, MODE, default=None)
    if str(mode).endswith("_async"):
        run.notes.append(f"{MODE}={mode} trains on samples of older weights: verl-fuse leaves such runs as they are")
    for line in run.notes:
        note(line)
    if as_json:
        print_json(report)
        return
    named = ("--script", str(script), *(("--", *arguments) if arguments else ())) if script else ("--", "ARGUMENTS")
    predict = shlex.join(("verl-fuse", "simulate", "h100", *named))
    _show(report, run, preset, choices, predict)


def _logger(config: DictConfig) -> str:
    """Return the override that gives the run's loggers the file that `compare` reads."""
    given = OmegaConf.select(config, LOGGER_KEY, default=None)
    own = [given] if isinstance(given, str) else [str(name) for name in given or ["console"]]
    return f"{LOGGER_KEY}=[{','.join(dict.fromkeys([*own, 'file']))}]"


def wrong_preset(config: DictConfig) -> dict[str, str]:
    """Return the preset that the run names if there is none of this name, with what is allowed."""
    asked, allowed = OmegaConf.select(config, PRESET_KEY, default=None), get_args(PresetName)
    return (
        {}
        if asked is None or asked in allowed
        else {f"{PRESET_KEY}={quoted(asked)}": f"allowed: {', '.join(allowed)}{nearest(asked, allowed)}"}
    )


def with_preset(run: Run) -> PresetName:
    """Let a synchronous run have mode `fuse`, and the preset that it asks for, or `fast`; return the preset. A plan of
    the run's, which no preset goes with, is left out, and noted; so is the switch that the environment turns off."""
    config = run.config
    preset: PresetName = "safe" if OmegaConf.select(config, PRESET_KEY, default=None) == "safe" else PRESET
    if plan := OmegaConf.select(config, PLAN_KEY, default=None):
        OmegaConf.update(config, PLAN_KEY, None)
        run.notes.append(f"{PLAN_KEY}={plan}: a plan says itself what is switched on; this is {preset}'s answer")
    if switched_off():
        run.notes.append(f"{VARIABLE}=off is set here: a run started with it is stock verl's")
    OmegaConf.set_struct(config, False)
    if OmegaConf.select(config, MODE, default=None) in _SYNCHRONOUS:
        OmegaConf.update(config, MODE, TRAINER_MODE, force_add=True)
    OmegaConf.update(config, PRESET_KEY, preset, force_add=True)
    return preset


def _report(run: Run, preset: PresetName, choices: Sequence[Choice], beside: Sequence[str]) -> dict[str, Any]:
    """Return the keys of `--json`; arguments `beside` a script are not in it yet."""
    config, get = run.config, getter(run.config)
    problems = [*(f"{override}: {why}" for override, why in run.faulty.items()), *refusals(run)]
    ours = [key for key in run.unknown if key.startswith("fuse.")]
    problems += [no_such_key(config, shown(argument)) for argument in run.arguments if key_of(argument) in ours]
    chosen = [choice.feature for choice in choices if not choice.reasons]
    on = [feature.switch for feature in chosen]
    unlock = {switch: list(_overrides(keys, run)) for switch, keys in unlocking(config, choices).items()}
    report = {
        "on": on,
        "off": {choice.feature.switch: list(map(str, choice.reasons)) for choice in choices if choice.reasons},
        "unlock": {switch: overrides for switch, overrides in unlock.items() if overrides},
        "paste": to_paste(run, preset, beside) if on and not problems else [],
        "takes": {
            one.feature.switch: takes for one in choices if not one.reasons and (takes := one.feature.takes(get))
        },
        "problems": problems,
        "unknown": list(dict.fromkeys(key for key in run.unknown if key not in ours)),
    }
    return report if run.unset is None else report | {"unset": run.unset}


def refusals(run: Run) -> list[str]:
    """Return what keeps the run from starting, as far as its script tells the values; its data and its checkpoint are
    not looked at."""
    untold = {key for keys in (run.unset or {}).values() for key in keys}
    untold_sizes = any(key.endswith(_OF_BATCHES) for key in untold)
    found = [
        str(one)
        for one in ([] if run.own_program else main_refusals(run.config))
        if one.key not in untold and not (untold_sizes and one.key.endswith(_OF_BATCHES))
    ]
    return [*refused(run.config, ()), *found]


def to_paste(run: Run, preset: PresetName, beside: Sequence[str]) -> list[str]:
    """Return the arguments that switch the preset on and are not the run's own; `beside` are not in its script yet."""
    planned = any(key_of(argument) == PLAN_KEY for argument in run.arguments)
    lines = (*SWITCH[run.has_fuse :], f"{PRESET_KEY}={preset}", *([f"{PLAN_KEY}=null"] if planned else []))
    return [line for line in lines if line not in run.arguments or line in beside]


def _overrides(keys: Mapping[str, Any], run: Run) -> Iterator[str]:
    """Yield overrides to put behind the run's own; a key that the run adds, or nobody has yet, is added anew."""
    added = {key_of(argument) for argument in run.arguments if argument.startswith("+")}
    for key, value in keys.items():
        parent, _, name = key.rpartition(".")
        there = key not in added and name in (OmegaConf.select(run.config, parent, default=None) or {})
        yield f"{'' if there else '++'}{key}={written(value)}"


def _show(report: Mapping[str, Any], run: Run, preset: PresetName, choices: Sequence[Choice], predict: str) -> None:
    if report["problems"]:
        say("The run is refused:")
        for problem in report["problems"]:
            say(f"  - {problem}")
    for name, keys in (run.unset or {}).items():
        say(f"The script does not tell {name}: {', '.join(keys)}")
    if report["unknown"]:
        unknown = ", ".join(near_key(run.config, key) for key in report["unknown"])
        without_plus = "verl refuses them as arguments without a +"
        say(f"Not in verl {installed('verl')}'s YAML, and left out here ({without_plus}): {unknown}")
    on = f"{PRESET_KEY}={preset} switches on: {', '.join(report['on']) or 'nothing'}"
    say(f"Were that mended, {on}" if report["problems"] else on)
    chosen = (choice for choice in choices if not choice.reasons)
    keys = {key: value for choice in chosen for key, value in choice.keys.items() if value is not True}
    if keys:
        say(f"with {' '.join(f'fuse.{key}={written(value)}' for key, value in keys.items())}")
    for switch, takes in report["takes"].items():
        say(f"{switch} takes {takes}")
    alike: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
    for switch, reasons in report["off"].items():
        # What differs in the name of the switch alone is said once.
        plain = tuple(reason.replace(f"fuse.{switch}=true needs", "needs") for reason in reasons)
        alike.setdefault((plain, tuple(report["unlock"].get(switch, ()))), []).append(switch)
    for (reasons, overrides), switches in alike.items():
        off = f"without {', '.join(switches)}:"
        several = [off, *(f"  - {reason}" for reason in reasons)]
        for line in several if len(reasons) > 1 else [f"{off} {reason}" for reason in reasons]:
            say(line)
        if overrides:
            # Another value of these is another training, and not only another place, engine or kernel.
            others = [key for key in map(key_of, overrides) if not key.endswith(_SAME_TRAINING)]
            marked = f" (other training: {', '.join(others)})" if others else ""
            say(f"  with {' '.join(overrides)} {'it is' if len(switches) == 1 else 'each can be'} on{marked}")
    if report["paste"]:
        typer.echo(f"Paste: {' '.join(report['paste'])}")
        typer.echo(f"For verl-fuse compare, both runs also need: '{_logger(run.config)}'")
        typer.echo(f"  and in the environment: {METRICS_PATH_VARIABLE}=RUN_DIR/{METRICS_FILE}, after mkdir -p RUN_DIR,")
        typer.echo("  each with a RUN_DIR of its own (of a job of Ray, in its runtime environment)")
        typer.echo(f"To predict the gain, and that of other sets: {predict}")
