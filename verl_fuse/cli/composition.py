"""Composes a recipe's configuration with the user's overrides, exactly like verl's entry point but without importing
verl.

Hydra's `pkg://` search paths import the package they name, and importing verl takes seconds; here the paths become
`file://`.
"""

import importlib.util
import os.path
import pickle
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl_fuse.cli.recipes import CONFIG, Recipe
from verl_fuse.errors import FuseError
from verl_fuse.spec.block import key_of, nearest, quoted
from verl_fuse.spec.composed import has_key

PACKAGE = "pkg://"
OWN_GROUPS = f"{PACKAGE}verl_fuse.host.config"
# Hydra's message about a key that an override changes and that does not exist begins so
# (hydra/_internal/config_loader_impl.py).
_NO_SUCH_KEY = "Could not override "


@dataclass(frozen=True)
class Source:
    """A primary configuration: its folder and name, Hydra's search paths beside the folder, and words for messages;
    `values` are merged into what it composes to."""

    folder: Path
    name: str
    paths: tuple[str, ...]
    title: str
    values: DictConfig | None = None


@dataclass(frozen=True)
class Composed:
    """A composed configuration, interpolations unresolved. It lacks the overrides in `unknown`, whose keys do not
    exist; `faulty` maps every other override that Hydra refuses to the reason."""

    config: DictConfig
    unknown: tuple[str, ...]
    faulty: dict[str, str]


def compose(recipe: Recipe, overrides: Sequence[str]) -> DictConfig:
    """Return the composed configuration, interpolations unresolved; a FuseError names every override
    or key that does not fit."""
    config, problems = compose_what_fits(recipe, overrides)
    if problems:
        raise FuseError(*problems)
    return config


def compose_what_fits(recipe: Recipe, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the configuration with all overrides of keys that exist, and a problem for each other override; a
    FuseError tells any other fault."""
    paths = OmegaConf.select(OmegaConf.load(recipe.folder / CONFIG), "hydra.searchpath")
    return what_fits(Source(recipe.folder, Path(CONFIG).stem, tuple(paths), f"recipe {recipe.name}"), overrides)


def what_fits(source: Source, overrides: Sequence[str]) -> tuple[DictConfig, list[str]]:
    """Return the configuration of a source like `compose_what_fits`."""
    found = composed(source, overrides)
    problems = [no_such_key(found.config, override) for override in found.unknown]
    return found.config, [*problems, *(f"{override}: {why}" for override, why in found.faulty.items())]


def composed(source: Source, overrides: Sequence[str]) -> Composed:
    """Compose once, with the overrides that name configurations of groups, and apply the others one by one like Hydra;
    a FuseError tells what cannot be read."""
    check_syntax(overrides)
    paths = [_as_file(path) for path in source.paths]
    folders = [source.folder, *(Path(path.removeprefix("file://")) for path in (*paths, _as_file(OWN_GROUPS)))]
    of_groups = [override for override in overrides if _is_of_group(override, folders)]
    found = _composed(source, of_groups)
    if source.values is not None:
        OmegaConf.set_struct(found, False)
        found.merge_with(source.values)
        OmegaConf.set_struct(found, True)
    unknown, faulty = apply(found, [override for override in overrides if override not in of_groups])
    return Composed(found, unknown, faulty)


def chooses(source: Source, group: str) -> bool:
    """Tell whether the defaults list of a primary configuration, or one that it names, has a group: an override then
    changes the choice, and cannot add one."""
    return group in OmegaConf.select(_composed(source, (), with_hydra=True), "hydra.runtime.choices")


def apply(config: DictConfig, overrides: Sequence[str]) -> tuple[tuple[str, ...], dict[str, str]]:
    """Apply overrides to a composed configuration like Hydra; return (the overrides of keys that do not exist, the
    other overrides that Hydra refuses with the reasons)."""
    refused = {override: why for override in overrides if (why := _refused(config, override))}
    unknown = tuple(override for override, why in refused.items() if why.startswith(_NO_SUCH_KEY))
    return unknown, {override: why for override, why in refused.items() if override not in unknown}


def as_text(value: object) -> str:
    """Return the value of an override that Hydra reads as this text, whatever stands in it."""
    # Of backslashes Hydra reads those before a quote alone as marks.
    return "'" + re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(value)) + "'"


def _is_of_group(override: str, folders: Sequence[Path]) -> bool:
    """Tell whether an override concerns Hydra itself, or names a configuration of a group."""
    key = key_of(override)
    return "@" in key or key.startswith("hydra.") or any(os.path.isdir(folder / key) for folder in folders)


def _refused(config: DictConfig, override: str) -> str | None:
    """Apply an override; return Hydra's reason where Hydra refuses it."""
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parsed, key = OverridesParser.create().parse_override(override), key_of(override)
    if parsed.is_sweep_override():
        return "several values are a sweep, which verl does not run; a list is written [a,b]"
    if override.startswith(key) and not has_key(config, key):
        # Hydra would leave an empty block where it begins to look for the key.
        return f"{_NO_SUCH_KEY}{key}"
    try:
        ConfigLoaderImpl._apply_overrides_to_config([parsed], config)
    except (HydraException, OmegaConfBaseException) as error:
        return _one_line(error)
    return None


def _composed(source: Source, overrides: Sequence[str], *, with_hydra: bool = False) -> DictConfig:
    from hydra.errors import HydraException

    given = list(overrides) or "no overrides"
    words = (f"hydra.searchpath=[{','.join(map(_as_file, source.paths))}]", *overrides)
    try:
        file = (source.folder / f"{source.name}.yaml").stat()
        version = (file.st_mtime_ns, file.st_size)
    except OSError:
        # Hydra tells what it looked for.
        version = None
    try:
        return pickle.loads(_by_hydra(source.folder, source.name, words, with_hydra, version))
    except (HydraException, OmegaConfBaseException) as error:
        raise FuseError(f"{source.title} with {given}: {_one_line(error)}") from error
    except (TypeError, ValueError) as error:
        # Hydra takes the value of a group (`fuse`, `data`) for a name without a look at the value.
        raise FuseError(
            f"{source.title} with {given}: {_one_line(error)}; a group of configurations takes the name of one, such "
            "as fuse=default"
        ) from error


@lru_cache(maxsize=64)
def _by_hydra(folder: Path, name: str, words: tuple[str, ...], with_hydra: bool, version: object) -> bytes:
    """Return what Hydra composes of a version of a file, pickled: Hydra takes a hundred times as long as reading it,
    and a search composes hundreds of times. Files of groups are read once a process."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    with initialize_config_dir(str(folder), version_base=None):
        return pickle.dumps(hydra_compose(name, [*words], return_hydra_config=with_hydra))


def no_such_key(config: DictConfig, override: str) -> str:
    """Return a sentence on an override of a key that is not in `config`, with the nearest key there is."""
    key = override.partition("=")[0]
    node, part, known = _deepest(config, key)
    if not key.startswith("fuse."):
        return f"{override}: there is no key {key}{nearest(part, known)}; +{override} adds one that verl's files lack"
    # Only a key within a block can be a plugin's; a block of that name is no slip of the pen.
    of_plugin = node is OmegaConf.select(config, "fuse") and key.count(".") > 1 and not nearest(part, known, 0.75)
    near, more = ("", f"; a plugin's: ++{override}") if of_plugin else (nearest(part, known), "")
    return f"{override}: there is no key {key}{near}; allowed: {', '.join(known)}{more}"


def near_key(config: DictConfig, key: str) -> str:
    """Return a key that is not in `config`, with the nearest name that its block has."""
    _, part, known = _deepest(config, key)
    return f"{key}{nearest(part, known, 0.75)}"


def _deepest(config: DictConfig, key: str) -> tuple[Any, str, list[str]]:
    """Return (the deepest block on the way to a key, the part of the key that it lacks, the names that it has)."""
    node, part = config, key
    for part in key.split("."):
        if not isinstance(node, DictConfig) or part not in node:
            break
        node = OmegaConf.select(node, part)
    return node, part, [str(name) for name in node] if isinstance(node, DictConfig) else []


def check_syntax(overrides: Sequence[str]) -> None:
    """Raise a FuseError with every override that is not Hydra's grammar."""
    if problems := unreadable(overrides):
        raise FuseError(*(f"override {override!r} {why}" for override, why in problems.items()))


def unreadable(overrides: Sequence[str]) -> dict[str, str]:
    """Return the overrides that are not Hydra's grammar, with the reasons."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, found = OverridesParser.create(), dict[str, str]()
    for override in overrides:
        try:
            parser.parse_override(override)
        except HydraException as error:
            forms = "key=value changes, +key=value adds, ~key removes"
            found[override] = f"cannot be read ({forms}): {_one_line(error)}"
    return found


def select(config: DictConfig, key: str) -> Any:
    """Return the resolved value of a dotted key; a FuseError if the key is missing or does not resolve."""
    try:
        value = OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise FuseError(f"{key}: {_one_line(error)}") from error
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def select_path(config: DictConfig, key: str) -> str:
    """Return the resolved value of a key that holds a path; a FuseError for anything but text."""
    value = select(config, key)
    if not isinstance(value, str) or not value:
        raise FuseError(f"{key}={quoted(value)}: needs a path")
    return value


def _as_file(path: str) -> str:
    if not path.startswith(PACKAGE):
        return path
    parts = path.removeprefix(PACKAGE).split(".")
    spec = importlib.util.find_spec(parts[0])
    if spec is None or not spec.submodule_search_locations:
        raise FuseError(f"the configuration search path {path} needs the package {parts[0]}, which is not installed")
    return f"file://{Path(next(iter(spec.submodule_search_locations))).joinpath(*parts[1:])}"


def _one_line(error: Exception) -> str:
    # Hydra's first lines name the fault and the existing keys; a list of search paths may follow.
    return " ".join(str(error).partition("Config search path")[0].split())
