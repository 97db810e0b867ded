"""Reads how a run of stock verl is launched: arguments of verl.trainer.main_ppo, a shell script that has them, or YAML.
Nothing of a file is run.

Invariants (tests/unit/cli/test_check_command.py):
- arguments behind `--script FILE --` are the script's own, or overrides where it passes none on;
- a configuration that has a choice of the group `fuse` gets no second one;
- a value that the script does not tell is left out where it is a number or a truth value, and verl's stands;
- a key that this verl does not have ends nothing.
"""

import importlib.util
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig, OmegaConf

from verl_fuse.cli.composition import (
    Composed,
    Source,
    apply,
    as_text,
    check_syntax,
    chooses,
    composed,
    unreadable,
)
from verl_fuse.cli.shell import TRAINER, Launch, find_launch, launch_of, of_environment, shown, told_end, untold
from verl_fuse.errors import FuseError
from verl_fuse.feature import SWITCH, PresetName
from verl_fuse.spec.block import key_of, written
from verl_fuse.spec.composed import has_key
from verl_fuse.spec.files import load, read_text
from verl_fuse.spec.yaml_file import MOST_YAML_BYTES, parse_yaml

PRESET_KEY = "fuse.preset"
VERL_CONFIG, CONFIG_NAME = "pkg://verl.trainer.config", "ppo_trainer"
_YAML = (".yaml", ".yml")
# Files that are read as shell scripts by mistake.
_NO_SCRIPTS = (".md", ".py", ".ipynb", ".json")
# Hydra's options that take a value (hydra/_internal/utils.py).
_PATH, _NAME, _DIRECTORY = ("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")
_WITH_VALUE = (*_PATH, *_NAME, *_DIRECTORY, "--package", "-p", "--cfg", "-c", "--info", "-i")
# Not of verl's own files.
_BESIDE_VERL = ("defaults", "hydra", "fuse", "recipe")


@dataclass
class Run:
    """A launched run: its configuration, the arguments as verl gets them, keys that this verl does not have, arguments
    that Hydra refuses with the reason, sentences on what was read, and what the script does not tell, with the keys
    that it concerns; whether it has a block `fuse` of its own, and whether its main program is the user's; of a
    command the primary configuration, and Hydra's options that name it from any folder."""

    config: DictConfig
    arguments: tuple[str, ...]
    unknown: list[str]
    faulty: dict[str, str]
    notes: list[str] = field(default_factory=list)
    unset: dict[str, list[str]] | None = None
    has_fuse: bool = False
    own_program: bool = False
    source: Source | None = None
    options: tuple[str, ...] = ()


def read_run(arguments: Sequence[str], script: Path | None) -> Run:
    """Return the run that these arguments launch, of the script or of main_ppo; a FuseError names what cannot be
    read."""
    if script is None:
        found = launch_of(arguments)
        return _composed(found or Launch(0, TRAINER, tuple(arguments)), None)
    if script.suffix in _YAML:
        return _of_yaml(script, arguments)
    if script.suffix in _NO_SCRIPTS:
        raise FuseError(f"{script}: needs a shell script that starts {TRAINER}, or a YAML file")
    launch, passes = load(script, lambda text: find_launch(text, str(script), arguments, os.environ))
    if not passes:
        launch = Launch(launch.line, launch.trainer, (*launch.arguments, *arguments), launch.lost)
    return _composed(launch, script)


def _composed(launch: Launch, script: Path | None) -> Run:
    options, words = _options(list(map(of_environment, launch.arguments)))
    notes = []
    if not launch.is_verl_s:
        notes.append(f"{launch.trainer} is another trainer than {TRAINER}, and is checked as that one")
    if launch.lost is not None:
        notes.append(
            f"line {launch.lost} is no argument: a comment or an empty line ends the command before it, in bash too"
        )
    told = [word for word in words if not untold(word)]
    # Such as a place that the user of a script is to fill in: <path>.
    faulty = unreadable(told)
    if told and len(faulty) == len(told):
        check_syntax(told)
    source = _source(options, script, launch)
    found, has_fuse = _with_fuse(source, [word for word in told if word not in faulty])
    run = Run(found.config, tuple(words), list(map(key_of, found.unknown)), faulty | found.faulty, notes)
    run.has_fuse, run.own_program = has_fuse, not launch.is_verl_s
    run.source, run.options = source, tuple(_named(options, source))
    unset: dict[str, list[str]] = {}
    for word in words:
        key = shown(key_of(word)) if "=" in word else ""
        for name in untold(word):
            place = key or shown(word)
            places = unset.setdefault(name, [])
            places += [place] if place not in places else []
        if untold(word) and key:
            _take(run, key, word)
    return run if script is None else replace(run, unset=unset)


def _take(run: Run, key: str, word: str) -> None:
    """Set a key to what the script tells of its value; a number, a truth value or null stays what verl has."""
    name, _, value = word.partition("=")
    there = OmegaConf.select(run.config, key, default=None)
    if untold(name):
        run.notes.append(f"{shown(word)}: left out, the script does not tell the key")
    elif key == PRESET_KEY:
        allowed = ", ".join(get_args(PresetName))
        run.notes.append(f"{shown(word)}: the script does not define {', '.join(untold(value))}; allowed: {allowed}")
    elif isinstance(there, str) or (there is None and "/" in value) or name.startswith("+"):
        unknown, faulty = apply(run.config, [f"{name}={as_text(shown(value))}"])
        run.unknown += map(key_of, unknown)
        run.faulty |= faulty
    elif there is None and not has_key(run.config, key):
        run.unknown.append(key)
    else:
        run.notes.append(f"{shown(word)}: the script does not tell the value; verl's, {written(there)}, is taken")


def _with_fuse(source: Source, overrides: Sequence[str]) -> tuple[Composed, bool]:
    """Return (the configuration, with the block `fuse` in any case; whether it has the block of its own)."""
    given = any(key_of(override) == "fuse" for override in overrides)
    # verl's own configuration has no choice of the group.
    given = given or (source.folder != _verl_folder() and chooses(source, "fuse"))
    return composed(source, overrides if given else [SWITCH[0], *overrides]), given


def _of_yaml(file: Path, arguments: Sequence[str]) -> Run:
    """Return the run of a primary configuration of Hydra, or of values that are merged into verl's configuration."""
    values = _block(file)
    _, words = _options(arguments)
    engine = values.get("model_engine") or _engine_of(values)
    defaults = [each for each in values.get("defaults") or () if (_verl_folder() / f"{each}.yaml").is_file()]
    verl = Source(_verl_folder(), defaults[0] if defaults else CONFIG_NAME, (), str(file))
    base = composed(verl, [f"model_engine={engine}"] if engine else [])
    if "defaults" in values:
        folder = file.resolve().parent
        source = Source(folder, file.stem, tuple(dict.fromkeys((*_paths(values), VERL_CONFIG))), str(file))
        found, has_fuse = _with_fuse(source, words)
    else:
        merged = OmegaConf.create({key: value for key, value in values.items() if key not in ("hydra", "recipe")})
        engines = [f"model_engine={engine}"] if engine else []
        found, has_fuse = _with_fuse(Source(verl.folder, CONFIG_NAME, (), str(file), merged), [*engines, *words])
    unknown = [*_unknown(values, base.config, ""), *(key_of(override) for override in found.unknown)]
    return Run(found.config, tuple(words), unknown, found.faulty, has_fuse=has_fuse)


def _block(file: Path) -> dict[str, Any]:
    """Return the keys of a YAML file, interpolations as they are."""
    text = read_text(file, MOST_YAML_BYTES)
    try:
        values = parse_yaml(text, resolve=False)
    except FuseError as error:
        raise FuseError(f"{file}: {error}") from error
    if not isinstance(values, dict) or not values:
        raise FuseError(f"{file}: needs a block of verl's keys")
    return values


def _engine_of(values: Mapping[str, Any]) -> str | None:
    for chosen in values.get("defaults") or ():
        if isinstance(chosen, dict) and (engine := chosen.get("override model_engine")):
            return engine
    strategy = OmegaConf.select(OmegaConf.create(dict(values)), "actor_rollout_ref.actor.strategy", default=None)
    return "megatron" if strategy == "megatron" else None


def _paths(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the search paths of a primary configuration that are there: some are of the folder that verl is run in."""
    hydra = values.get("hydra")
    for path in (hydra.get("searchpath") if isinstance(hydra, dict) else None) or ():
        if path.startswith("pkg://") or Path(path.removeprefix("file://")).is_dir():
            yield path


def _unknown(values: Mapping[str, Any], known: DictConfig, path: str) -> Iterator[str]:
    """Yield the keys of `values` that verl's own configuration lacks. A block that is empty there takes any."""
    for key, value in values.items():
        if not path and key in _BESIDE_VERL:
            continue
        if key not in known.keys():  # noqa: SIM118  (a key without a value counts)
            yield f"{path}{key}"
        elif isinstance(value, dict) and not OmegaConf.is_missing(known, key):
            below = known._get_node(key)
            if isinstance(below, DictConfig) and not below._is_none() and not below._is_interpolation() and len(below):
                yield from _unknown(value, below, f"{path}{key}.")


def _options(words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return (Hydra's options with their values, the other words); options without a value change no configuration."""
    options: dict[str, str] = {}
    rest: list[str] = []
    waiting = ""
    for word in words:
        name, equals, value = word.partition("=")
        if waiting:
            options[waiting], waiting = word, ""
        elif name in _WITH_VALUE and equals:
            options[name] = value
        elif word in _WITH_VALUE:
            waiting = word
        elif not word.startswith("-"):
            rest.append(word)
    return options, rest


def _named(options: Mapping[str, str], source: Source) -> Iterator[str]:
    for name, value in options.items():
        if name in _PATH:
            yield from (name, str(source.folder))
        elif name in _NAME:
            yield from (name, source.name)
        elif name in _DIRECTORY:
            yield from (name, str(Path(value).absolute()))


def _source(options: Mapping[str, str], script: Path | None, launch: Launch) -> Source:
    """Return the primary configuration that the options name: verl's own, or a file beside the script."""
    paths, names, directories = (
        [options[name] for name in group if name in options] for group in (_PATH, _NAME, _DIRECTORY)
    )
    name = names[0].removesuffix(".yaml") if names else CONFIG_NAME
    verl = _verl_folder()
    # Hydra begins a relative path in the folder of main_ppo.
    named = [verl.parent / path for path in paths if launch.is_verl_s and not untold(path)]
    own = not paths or any(folder.resolve() == verl.resolve() for folder in named)
    if own and (verl / f"{name}.yaml").is_file():
        return Source(verl, name, tuple(directories), TRAINER)
    here = [Path.cwd(), *(script.resolve().parents if script else ())]
    # What the script does not tell of a path is where the path begins.
    parts = Path(told_end(paths[0]).lstrip("/")).parts if paths else ()
    ends = [Path(*parts[index:]) for index in range(len(parts))] or [Path("config"), Path()]
    given = [Path(paths[0])] if paths and not untold(paths[0]) else []
    for folder in [*named, *given, *(folder / end for end in ends for folder in here)]:
        if (file := folder / f"{name}.yaml").is_file():
            search = dict.fromkeys((*_paths(_block(file)), *directories, VERL_CONFIG))
            return Source(folder.resolve(), name, tuple(search), str(file))
    where = f" --config-path {shown(paths[0])}" if paths else ""
    raise FuseError(
        f"{launch.trainer}{where} --config-name {shown(name)}: {shown(name)}.yaml is neither of verl, nor there, nor "
        "beside the script or here: it is needed for the values in it"
    )


def _verl_folder() -> Path:
    spec = importlib.util.find_spec("verl")
    if spec is None or not spec.submodule_search_locations:
        raise FuseError("verl is not installed: its default values are needed (pip install 'verl-fuse[verl]')")
    return Path(next(iter(spec.submodule_search_locations))) / "trainer" / "config"
