"""Checks contracts at start: a broken contract refuses the run, and changed code is logged once."""

import logging
from collections.abc import Mapping
from typing import Any

import pluggy
from omegaconf import OmegaConf

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.judge import Level
from verl_fuse.host.start.compat.seams import PACKAGES, Seam, SeamVerdict, host_seams, judge_all, lines, plugin_seams
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.host.upstream.versions import SUPPORTED, installed, problem
from verl_fuse.spec.contract import package

# Packages that matter only to runs which generate with them: another version of such a package may lie beside the
# engine in use.
ROLLOUT_ENGINES = ("vllm",)
# Packages that matter only to runs which train with Megatron.
MEGATRON_PACKAGES = ("megatron", "mbridge")

ENGINE_BLOCKS = ("actor_rollout_ref.actor", "actor_rollout_ref.ref", "critic")

# A refusal names this many broken contracts; doctor lists them all.
MOST_BROKEN_SHOWN = 20

logger = logging.getLogger(__name__)


def require_version() -> None:
    """Raise a FuseError unless every upstream distribution is installed in a supported version; the error lists the
    missing code."""
    problems = [text for name in SUPPORTED if (text := problem(name, installed(name)))]
    if problems:
        raise FuseError("; ".join(problems) + _listed(installed_verdicts(host_seams())))


def require_contracts(manager: pluggy.PluginManager, config: Mapping[str, Any]) -> list[SeamVerdict]:
    """Return the verdicts on the installed packages for a run with this configuration; a FuseError lists the broken
    contracts."""
    engine = OmegaConf.select(config, "actor_rollout_ref.rollout.name")  # type: ignore[arg-type]
    unused = {name for name in ROLLOUT_ENGINES if name != engine}
    if not any(OmegaConf.select(config, f"{role}.strategy") == "megatron" for role in ENGINE_BLOCKS):  # type: ignore[arg-type]
        unused.update(MEGATRON_PACKAGES)
    seams = [*host_seams(), *plugin_seams(manager, config)]
    verdicts = installed_verdicts([seam for seam in seams if package(seam.contract) not in unused])
    if broken := _listed(verdicts):
        versions = ", ".join(f"{name} {installed(name)}" for name in SUPPORTED)
        raise FuseError(f"what is installed ({versions}) is not what verl-fuse was written for{broken}")
    return verdicts


def warn_of_changes(verdicts: list[SeamVerdict]) -> None:
    """Log, in one warning, the code that upstream changed since it was read."""
    if changed := lines(verdicts, Level.YELLOW):
        logger.warning(
            "upstream code has changed since this release was tested with it; watch the first steps:\n  - %s",
            "\n  - ".join(changed),
        )


def installed_verdicts(seams: list[Seam]) -> list[SeamVerdict]:
    """Judge the packages installed here."""
    return judge_all(seams, SourceTree.installed(*PACKAGES))


def _listed(verdicts: list[SeamVerdict]) -> str:
    broken = lines(verdicts, Level.RED)
    if not broken:
        return ""
    rest = (
        f"\n  - and {len(broken) - MOST_BROKEN_SHOWN} more: verl-fuse doctor lists them"
        if len(broken) > MOST_BROKEN_SHOWN
        else ""
    )
    return ". It rests on what is not there, or differs:\n  - " + "\n  - ".join(broken[:MOST_BROKEN_SHOWN]) + rest
