"""Finds plugins, refuses plugins that do not fit, and hands back a manager that calls them.

Invariants (tests/unit/test_plugins.py):
- importing this module loads no plugin; `load` is the only function that loads a plugin;
- built-ins go through the same checks as strangers and are registered first, so a third-party policy is asked first;
- a plugin that cannot be used is a FuseError naming the plugin and its distribution, never a
  plugin left out in silence.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from typing import Any, cast, get_args

import pluggy

from verl_fuse import __version__, hookspecs
from verl_fuse.errors import FuseError
from verl_fuse.feature import Feature, PresetName
from verl_fuse.simulate.options import SIMULATED_STRATEGIES, features_of
from verl_fuse.spec.block import nearest

PLUGIN_GROUP = "verl_fuse"

# Plugin name (the config block `fuse.<name>`) -> class.
BUILTIN = {
    "interstage": "verl_fuse_interstage.plugin:InterstagePlugin",
    "elastic": "verl_fuse_elastic.plugin:ElasticPlugin",
    "pipeline": "verl_fuse_pipeline.plugin:PipelinePlugin",
    "placement": "verl_fuse_placement.plugin:PlacementPlugin",
    "realloc": "verl_fuse_realloc.plugin:ReallocPlugin",
    "speculation": "verl_fuse_speculation.plugin:SpeculationPlugin",
    "update": "verl_fuse_update.plugin:UpdatePlugin",
    "observe": "verl_fuse_observe.plugin:ObservePlugin",
    "cpu": "verl_fuse_cpu.plugin:CpuPlugin",
}

_NAME = re.compile(r"[a-z][a-z0-9_]*")


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """The source of a plugin; no module is imported until `load`."""

    name: str
    distribution: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"plugin {self.name!r} (from {self.distribution}, {self.entry_point.value})"

    def load(self) -> object:
        """Import the plugin, and make an instance of it if it is a class; every exception becomes a FuseError with the
        original chained."""
        try:
            found = self.entry_point.load()
            return found() if isinstance(found, type) else found
        except Exception as error:
            raise FuseError(f"{self} failed to load: {_described(error)}") from error


def discover() -> tuple[Source, ...]:
    """List built-in and installed plugins, built-ins first, without importing any; two of one name are refused. A
    built-in plugin whose folder was deleted is not among them."""
    builtin = (
        Source(name, "verl-fuse", EntryPoint(name, module, PLUGIN_GROUP))
        for name, module in BUILTIN.items()
        # A feature is deleted by deleting its folder.
        if find_spec(module.partition(".")[0]) is not None
    )
    installed = sorted(entry_points(group=PLUGIN_GROUP), key=lambda entry: (entry.name, entry.value))
    found: dict[str, Source] = {}
    strangers = (
        Source(entry.name, entry.dist.name if entry.dist is not None else "an unknown distribution", entry)
        for entry in installed
    )
    for source in (*builtin, *strangers):
        if not _NAME.fullmatch(source.name):
            raise FuseError(f"{source}: the name becomes the key `fuse.<name>`; allowed: {_NAME.pattern}")
        if source.name in found:
            raise FuseError(
                f"two plugins are named {source.name!r}: {found[source.name]} and {source}; uninstall one of them"
            )
        found[source.name] = source
    return tuple(found.values())


def hooks(*plugins: object) -> Any:
    """Return the hooks of these plugins alone, checked as a run checks them: classes, which are made, or instances; the
    last is asked first. Call hooks by keyword: `hooks(Mine).fuse_infer_next(view=view, lane=lane)`."""
    manager = _manager()
    for number, plugin in enumerate(plugins):
        made = plugin() if isinstance(plugin, type) else plugin
        register(manager, made, f"plugin{number}", f"plugin {type(made).__name__}")
    return manager.hook


def load(disabled: Collection[str] = ()) -> pluggy.PluginManager:
    """Load every plugin not in `disabled` and check it; the last registered is asked first by firstresult hooks."""
    sources = discover()
    unknown = sorted(set(disabled) - {source.name for source in sources})
    if unknown:
        raise FuseError(
            f"cannot disable unknown plugin {', '.join(unknown)}; installed: {', '.join(s.name for s in sources)}"
        )
    manager = _manager()
    for source in sources:
        if source.name not in disabled:
            unlock = f"install a matching version or set fuse.disabled_plugins=[{source.name}]"
            register(manager, source.load(), source.name, str(source), unlock)
    return manager


def _manager() -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PLUGIN_GROUP)
    manager.add_hookspecs(hookspecs)
    return manager


def config_blocks(manager: pluggy.PluginManager) -> dict[str, type]:
    """Map each plugin's name to the frozen dataclass it declares through `fuse_config`, in order of registration."""
    blocks: dict[str, type] = {}
    for impl in manager.hook.fuse_config.get_hookimpls():
        block = impl.function()
        if not (
            dataclasses.is_dataclass(block) and isinstance(block, type) and vars(block)["__dataclass_params__"].frozen
        ):
            raise FuseError(
                f"plugin {impl.plugin_name!r}: fuse_config returned {block!r}; expected a frozen dataclass (the class "
                "itself)"
            )
        required = [f.name for f in dataclasses.fields(block) if f.default is f.default_factory is dataclasses.MISSING]
        if required:
            raise FuseError(
                f"plugin {impl.plugin_name!r}: fields of {block.__name__} without a default: {', '.join(required)}"
            )
        blocks[impl.plugin_name] = block
    return blocks


def features(manager: pluggy.PluginManager) -> dict[str, Feature]:
    """Return the records of all features by name, in order of registration; a FuseError names a plugin whose record
    cannot be used."""
    blocks, found = config_blocks(manager), dict[str, Feature]()
    for impl in manager.hook.fuse_features.get_hookimpls():
        try:
            records = tuple(cast(Iterable[Feature], impl.function()))
        except Exception as error:
            raise FuseError(f"plugin {impl.plugin_name!r}: fuse_features failed: {_described(error)}") from error
        for feature in records:
            if fault := _fault(feature, impl.plugin_name, blocks, found):
                raise FuseError(f"plugin {impl.plugin_name!r}: feature {getattr(feature, 'name', feature)!r}: {fault}")
            found[feature.name] = feature
    return found


def _fault(feature: Feature, plugin: str, blocks: Mapping[str, type], found: Mapping[str, Feature]) -> str | None:
    """Return the fault of a record of this plugin, or None."""
    if not isinstance(feature, Feature):
        return "needs to be a verl_fuse.feature.Feature"
    if not _NAME.fullmatch(feature.name):
        return f"allowed names: {_NAME.pattern}"
    if feature.name in found:
        return f"the plugin {found[feature.name].switch.partition('.')[0]!r} has a feature of this name"
    if feature.name in SIMULATED_STRATEGIES and feature.strategy not in ("", feature.name):
        return "the simulator has a strategy of this name"
    presets = set(feature.presets) - set(get_args(PresetName))
    if presets:
        return f"presets: {', '.join(sorted(presets))}; allowed: {', '.join(get_args(PresetName))}"
    keys = [*feature.keys, *(key for more in feature.presets.values() for key in more)]
    known = {f"{name}.{field.name}" for name, block in blocks.items() for field in dataclasses.fields(block)}
    if not feature.keys or not feature.switch.startswith(f"{plugin}.") or feature.switch not in known:
        return f"its first key needs to be one of fuse.{plugin}, whose class fuse_config returns"
    # Keys of a plugin that is left out refuse the feature where it is tried.
    unknown = [key for key in keys if key.partition(".")[0] in blocks and key not in known]
    if unknown:
        return f"unknown key fuse.{unknown[0]}"
    try:
        features_of(feature.strategy or "stock")
    except FuseError as error:
        return str(error)
    return None


def register(
    manager: pluggy.PluginManager,
    plugin: object,
    name: str,
    source: str,
    unlock: str = f"set HOOK_API = {hookspecs.HOOK_API} in it",
) -> None:
    """Register a plugin, which is asked before all others so far; a FuseError, which calls it `source`, says what keeps
    it from being used. `unlock` tells what is done about a plugin for another version of the hooks."""
    version = getattr(plugin, "HOOK_API", None)
    if version != hookspecs.HOOK_API:
        changed = f" ({hookspecs.SINCE_1})" if version == 1 else ""
        raise FuseError(
            f"{source} declares HOOK_API={version!r}; verl-fuse {__version__} offers {hookspecs.HOOK_API}{changed}: "
            f"{unlock}"
        )
    known = {name for name in dir(hookspecs) if manager.parse_hookspec_opts(hookspecs, name) is not None}
    for attribute in dir(plugin):
        options = manager.parse_hookimpl_opts(plugin, attribute)
        if options is None and attribute.startswith("fuse_") and inspect.isroutine(getattr(plugin, attribute)):
            raise FuseError(f"{source}: {attribute} is not marked with @hookimpl{_closest(attribute, known)}")
        if options is not None and not options["optionalhook"]:
            hook = options["specname"] or attribute
            if hook not in known:
                raise FuseError(f"{source}: there is no hook {hook}{_closest(hook, known)}")
            takes = inspect.signature(getattr(hookspecs, hook)).parameters
            for argument in inspect.signature(getattr(plugin, attribute)).parameters:
                if argument not in takes:
                    close, allowed = nearest(argument, tuple(takes)), ", ".join(takes)
                    raise FuseError(f"{source}: {attribute} has no argument {argument}{close}; it takes {allowed}")
    try:
        manager.register(plugin, name)
    except (pluggy.PluginValidationError, ValueError) as error:  # wrong arguments; one object under two names
        raise FuseError(f"{source}: {error}") from error


def _closest(name: str, known: Collection[str]) -> str:
    if name in known:
        return ""
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else f"; hooks: {', '.join(sorted(known))}"


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
