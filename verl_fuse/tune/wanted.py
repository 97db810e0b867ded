"""Which candidates a user wants to have tried: keys named, and what other values may cost.

Invariants (tests/unit/tune/test_wanted.py):
- a key that is asked for is tried, or refused with a reason;
- a setting that cuts mini-batches anew or ends resuming is tried only where that is allowed;
- a base whose budgets do not hold the longest sequence is refused, however short its first responses are.
"""

from collections.abc import Collection, Iterator

from omegaconf import DictConfig

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import nearest, written
from verl_fuse.spec.composed import getter, is_legacy
from verl_fuse.tune.candidates import Candidate, candidates, not_tried, too_small
from verl_fuse.tune.setting import FEATURES, Setting
from verl_fuse.tune.table import BY_KEY, setting_of

# Columns of the table whose settings are tried on request.
ALLOWED = ("cuts_mini_batches", "ends_resume")
COLUMNS = ("rounds", *ALLOWED)


def wanted(config: DictConfig, keys: Collection[str], allow: Collection[str]) -> tuple[Candidate, ...]:
    """Return the candidates among `keys` (all, if there are none) that cost no more than is allowed."""
    found = candidates(config)
    return tuple(each for each in found if (not keys or each.setting.key in keys) and not _costs(each.setting, allow))


def check(
    config: DictConfig, keys: Collection[str], allow: Collection[str], others: Collection[Candidate] = ()
) -> None:
    """Refuse what cannot be served; a FuseError names every value and what is allowed. `others` are tried as well."""
    if problems := [*_problems(config, keys, allow)]:
        raise FuseError(*problems)
    if not others and not wanted(config, keys, allow):
        raise FuseError("no setting of the table has another value to try in this configuration")


def columns(key: str) -> tuple[str, ...]:
    """Return what other values of a key cost: the columns that are true of its setting. A feature leaves mini-batches
    and checkpoints as they are."""
    if key.startswith(FEATURES):
        return ("rounds",)
    setting = setting_of(key)
    return () if setting is None else tuple(column for column in COLUMNS if getattr(setting, column))


def _problems(config: DictConfig, keys: Collection[str], allow: Collection[str]) -> Iterator[str]:
    mode = getter(config)("trainer.v1.trainer_mode")
    if is_legacy(config):
        yield "trainer.use_v1=false: needs true: the trainer before V1 reads other keys"
    elif mode not in (None, "fuse", "sync"):
        reason = "an asynchronous step is not one after the other"
        yield f"trainer.v1.trainer_mode={written(mode)}: needs fuse or sync: {reason}"
    for each in candidates(config):
        if least := too_small(each):
            longest = (
                "a prompt and a response may have so many tokens, and verl ends at one that the budget does not hold"
            )
            yield f"{each.setting.key}={each.current}: needs {least} or more: {longest}"
    for column in allow:
        if column not in ALLOWED:
            yield f"--allow {column}{nearest(column, ALLOWED)}: allowed: {', '.join(ALLOWED)}"
    for key in keys:
        setting, why = BY_KEY.get(key), not_tried(key, config)
        # Another key that is tried may bring it into play.
        if why and not (setting and any(need in keys for need in setting.needs)):
            yield f"--keys {key}: {why}"
        elif setting and (costs := _costs(setting, allow)):
            yield f"--keys {key}: needs {' '.join(f'--allow {column}' for column in costs)}"


def _costs(setting: Setting, allow: Collection[str]) -> tuple[str, ...]:
    """Return what values of a setting cost beside what is allowed."""
    return tuple(column for column in ALLOWED if getattr(setting, column) and column not in allow)
