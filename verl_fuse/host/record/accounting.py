"""Accounts for every sample of a step: trained exactly once, under the weights of the step before.

Invariants (tests/unit/host/test_accounting.py):
- no key twice, no sample of another partition, no sample whose weights version is not the step's own;
- a failed rollout shows as a missing sample of its group (verl pads the batch with masked rows), never as a
  sample with reward zero.
"""

import json
import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.files import write_atomically
from verl_fuse.spec.trajectory import TrajectoryKey

logger = logging.getLogger(__name__)

ACCOUNTS_FOLDER = "accounts"


@dataclass(frozen=True, slots=True)
class StepAccount:
    """The account of one step's samples. `groups` maps a prompt group to its number of samples; `missing` counts
    sessions that left no sample."""

    step: int
    samples: int
    padding: int
    missing: int
    groups: Mapping[str, int]

    def metrics(self) -> dict[str, float]:
        return {
            "fuse/samples_trained": float(self.samples),
            "fuse/samples_missing": float(self.missing),
            "fuse/rows_padding": float(self.padding),
        }


def account(
    step: int, keys: Sequence[str], tags: Sequence[Mapping[str, Any]], expected: int, version: int | None
) -> StepAccount:
    """Check and count the rows of the batch that `step` trains on.

    `expected` is the number of sessions (samples) asked for; `version` is the weights version that the samples must
    come from (None: replayed from disk).
    """
    if len(set(keys)) != len(keys):
        twice = sorted({key for key in keys if list(keys).count(key) > 1})
        raise FuseError(f"step {step}: {len(twice)} samples appear twice in the batch, first {twice[0]}")
    groups: Counter[str] = Counter()
    sessions: set[tuple[str, int]] = set()
    for key, tag in zip(keys, tags, strict=True):
        if tag.get("is_padding"):
            continue
        versions = (tag.get("min_global_steps"), tag.get("max_global_steps"))
        if version is not None and versions != (version, version):
            raise FuseError(
                f"step {step}: sample {key} was generated under weights versions {versions[0]}..{versions[1]}, but "
                f"strictly on-policy training needs {version}"
            )
        uid, session, _ = TrajectoryKey.parse(key)
        groups[uid] += 1
        sessions.add((uid, session))
    samples = groups.total()
    return StepAccount(step, samples, len(keys) - samples, max(0, expected - len(sessions)), groups)


def write_account(run_dir: Path, account: StepAccount, prompts: Sequence[int | str | None]) -> Path:
    """Write `accounts/step_N.json`: the samples that step N trained on; `prompts` are the data set indices of its
    groups. A repeated step replaces its file."""
    target = run_dir / ACCOUNTS_FOLDER / f"step_{account.step:06d}.json"
    data = {
        "step": account.step,
        "samples": account.samples,
        "padding": account.padding,
        "missing": account.missing,
        "groups": len(account.groups),
        "prompts": sorted(prompts, key=str),
    }
    write_atomically(target, json.dumps(data))
    return target


def recorded(run_dir: Path, account: StepAccount, prompts: Sequence[int | str | None]) -> bool:
    """Call `write_account`; return False where the disk refuses."""
    try:
        write_account(run_dir, account, prompts)
    except OSError as error:
        # The step itself is accounted for; a full disk must not cost a finished rollout.
        logger.error("the account of step %d could not be written: %s", account.step, error)
        return False
    return True


def prepare_accounts(run_dir: Path) -> None:
    """Make the folder of the accounts, or refuse the run."""
    folder = run_dir / ACCOUNTS_FOLDER
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FuseError(f"fuse.run_dir={run_dir}: {folder} cannot be made: {error.strerror}") from error
