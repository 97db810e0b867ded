"""The drafters of all replicas leave the samples that ended in a folder, and find the samples of the others there:
history reaches whichever replica gets a prompt next, and a run that goes on from a checkpoint.

Invariants (tests/unit/speculation/test_shelf.py):
- a drafter reads every sample that another drafter left, once, and none of its own;
- a sample that is still being written is read when the sample is whole;
- the folder never holds more than its limit and one file of each drafter: the oldest files go;
- a file that no drafter wrote so is named once and left; samples before the damage are read, and nothing that an engine
cannot have generated.
"""

import logging
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import numpy as np

from verl_fuse.spec.arrays import Tokens
from verl_fuse_speculation.prompts import PromptDigest

SAMPLES_SUFFIX = ".samples"
STEP_FILE = "step"
# A drafter fills files one after the other; each file holds so much of the folder's limit.
FILE_SHARE = 1 / 16
_HEAD = struct.Struct("<iiii16s")
_TOKEN_BYTES = 4
# A step has at most so many digits, as a file and as a 32-bit number.
_STEP_DIGITS = 9

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PastSample:
    """The tokens of a sample of `prompt` of the step `step`, after `context`, the prompt's last tokens."""

    prompt: PromptDigest
    step: int
    context: Tokens
    tokens: Tokens

    def to_bytes(self) -> bytes:
        head = _HEAD.pack(len(self.tokens), len(self.context), self.prompt.length, self.step, self.prompt.digest)
        return head + np.concatenate([self.context, self.tokens]).astype(np.int32).tobytes()


@dataclass
class Shelf:
    """The shared folder of one drafter; all files together may hold `limit` bytes. A sample has at most `longest`
    tokens with its prompt, each below `vocabulary`."""

    folder: Path
    limit: int
    longest: int
    vocabulary: int
    name: str = field(default_factory=lambda: uuid4().hex)
    _files: int = 0
    _begun: bool = False
    _read: dict[str, int] = field(default_factory=dict)
    _damaged: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def put(self, samples: list[PastSample]) -> None:
        """Leave samples for the other drafters."""
        if self._begun and not self._path.exists():
            # Another drafter made room: readers know a file of this name up to the place where they read.
            self._next_file()
        self._begun = True
        try:
            with self._path.open("ab") as file:
                file.write(b"".join(sample.to_bytes() for sample in samples))
                full = file.tell() > self.limit * FILE_SHARE
        except OSError:
            # Nothing may follow a sample that was cut off.
            self._next_file()
            raise
        if full:
            self._next_file()
            self._make_room()

    @property
    def _path(self) -> Path:
        return self.folder / f"{self.name}-{self._files}{SAMPLES_SUFFIX}"

    def _next_file(self) -> None:
        self._files += 1
        self._begun = False

    def news(self) -> Iterator[PastSample]:
        """Yield the samples that other drafters left since the last call, the oldest files first."""
        for path in self._by_age():
            if not path.name.startswith(self.name) and path.name not in self._damaged:
                yield from self._unread(path)

    def step(self) -> int:
        """Return the step that the driver announced; 0 where the driver announced none."""
        try:
            with (self.folder / STEP_FILE).open("rb") as file:
                said = file.read(_STEP_DIGITS + 1)
        except FileNotFoundError:
            return 0
        if said.isdigit() and len(said) <= _STEP_DIGITS:
            return int(said)
        self._leave(self.folder / STEP_FILE, f"{said!r} is no step")
        return 0

    def _unread(self, path: Path) -> Iterator[PastSample]:
        try:
            with path.open("rb") as file:
                file.seek(self._read.get(path.name, 0))
                # The rest of a larger file is read at the next call; a sample is never larger.
                data = file.read(max(self.limit, _HEAD.size + 2 * self.longest * _TOKEN_BYTES))
        except FileNotFoundError:
            return  # another drafter made room
        at = 0
        while at + _HEAD.size <= len(data):
            tokens, context, length, step, digest = _HEAD.unpack_from(data, at)
            most = self.longest
            if not (1 <= tokens <= most and 0 <= context <= most and 1 <= length <= most and step >= 0):
                self._leave(
                    path, f"a sample of {tokens} tokens after {context}, with a prompt of {length}, step {step}"
                )
                return
            end = at + _HEAD.size + _TOKEN_BYTES * (tokens + context)
            if end > len(data):
                break
            found = np.frombuffer(data, np.int32, tokens + context, at + _HEAD.size).copy()
            if len(found) and not 0 <= found.min() <= found.max() < self.vocabulary:
                self._leave(path, f"tokens from {found.min()} to {found.max()}, of {self.vocabulary}")
                return
            yield PastSample(PromptDigest(length, digest), step, found[:context], found[context:])
            at = end
        self._read[path.name] = self._read.get(path.name, 0) + at

    def _leave(self, path: Path, why: str) -> None:
        if path.name not in self._damaged:
            self._damaged.add(path.name)
            logger.warning("%s is damaged, and left: %s", path, why)

    def _by_age(self) -> list[Path]:
        found = []
        for path in self.folder.glob(f"*{SAMPLES_SUFFIX}"):
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # another drafter made room
            # Opening a pipe would wait for its writer.
            if stat.S_ISREG(status.st_mode):
                found.append((status.st_mtime_ns, path))
        return [path for _, path in sorted(found)]

    def _make_room(self) -> None:
        held = 0
        for path in reversed(self._by_age()):
            try:
                held += path.stat().st_size
            except FileNotFoundError:
                continue  # another drafter made room
            if held > self.limit:
                path.unlink(missing_ok=True)


def say_step(folder: Path, step: int) -> None:
    """Tell the drafters that share `folder` which step begins."""
    folder.mkdir(parents=True, exist_ok=True)
    whole = folder / f".{STEP_FILE}"
    whole.write_text(str(step))
    os.replace(whole, folder / STEP_FILE)
