"""The training set of runs that share a device and take turns, a step each: while one run makes its step, the others
wait for their next batch, with everything they hold in the device's memory.

verl asks its data set for a batch at the beginning of each step, in the process of its trainer
(`PPOTrainer._next_train_batch`, `data.dataloader_num_workers=0`). The environment names the folder in which the runs
tell each other how many batches they have asked for (TURNS), and the runs in their order (ARMS), this one (ARM) and the
prompts of a batch (PROMPTS). The seconds at which a turn began and ended go to `TURNS/ARM.turns`, a line each.

Invariants (tests/unit/gpu/test_whole.py):
- runs make their n-th steps one after the other, in the order of ARMS, and none begins before all are ready;
- a run that has ended holds nobody up, and a run waits LONGEST seconds at most.
"""

import os
import time
from pathlib import Path

from verl.utils.dataset.rl_dataset import RLHFDataset

LONGEST = 600.0
POLL_SECONDS = 0.02


class Turns:
    """The turns of one run; `folder` holds ARM.asked with the number of batches asked for, and ARM.ended."""

    def __init__(self, folder: Path, arms: list[str], arm: str):
        self._folder, self._arms, self._arm = folder, arms, arm
        self._asked = 0

    def next(self) -> None:
        """End this run's turn, and return when its next one begins."""
        now = time.time()
        if self._asked:
            self._write(f"end {now}")
        self._asked += 1
        write_whole(self._folder / f"{self._arm}.asked", str(self._asked))
        while not self._is_ours() and time.time() < now + LONGEST:
            time.sleep(POLL_SECONDS)
        self._write(f"begin {time.time()}")

    def _is_ours(self) -> bool:
        before = True
        for arm in self._arms:
            if arm == self._arm:
                before = False
            elif not (self._folder / f"{arm}.ended").exists():
                asked = self._folder / f"{arm}.asked"
                # The runs before this one have made this step when they ask for the next.
                if int(asked.read_text() if asked.exists() else 0) < self._asked + before:
                    return False
        return (self._folder / "begin").exists()

    def _write(self, line: str) -> None:
        with (self._folder / f"{self._arm}.turns").open("a") as file:
            file.write(line + "\n")


class TurnsDataset(RLHFDataset):
    """verl's data set; the first sample of a batch waits for the run's turn."""

    def __getitem__(self, item):
        if not hasattr(self, "turns"):
            variables = [os.environ[name] for name in ("TURNS", "ARMS", "ARM", "PROMPTS")]
            self.turns = Turns(Path(variables[0]), variables[1].split(","), variables[2])
            self.taken, self.batch = 0, int(variables[3])
        if self.taken % self.batch == 0:
            self.turns.next()
        self.taken += 1
        return super().__getitem__(item)


def write_whole(path: Path, text: str) -> None:
    """Write a file that a reader finds whole or not at all."""
    part = path.with_suffix(".part")
    part.write_text(text)
    part.replace(path)
