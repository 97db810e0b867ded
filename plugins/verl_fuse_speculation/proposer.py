"""A drafter for vLLM's speculative method `custom_class` drafts from the history of the prompt; each engine's worker
processes make one.

vLLM verifies every draft by rejection sampling, so nothing here can change the samples, only how soon they are done.
vLLM tells a drafter the rows of its batch and the tokens that were sampled last; the tokens of a row tell its sample.

Invariants (tests/unit/speculation/test_proposer.py):
- every sample's tokens are in the history, whichever row the sample is in;
- no draft reaches beyond the longest sequence the engine takes;
- every token is left for other replicas once, when its sample has ended or paused, whatever ended the sample;
- a sample that is left out of passes goes on as the same sample;
- the memory for prompts and samples that are gone is bounded.
"""

import logging
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_fuse.spec.arrays import Tokens
from verl_fuse_speculation import passes
from verl_fuse_speculation.engine import BLOCK
from verl_fuse_speculation.history import LEAST_CHANCE, NOWHERE, History
from verl_fuse_speculation.pays import Pays
from verl_fuse_speculation.prompts import PromptDigest, Prompts
from verl_fuse_speculation.rows import KNOWN_TOKENS, OTHER, STAYS, Rows, compile_kernels
from verl_fuse_speculation.shelf import PastSample, Shelf

logger = logging.getLogger(__name__)

# Seconds without a pass after which all samples have ended, as far as other replicas are concerned.
IDLE_SECONDS = 0.5
# Seconds between two looks at the samples that other replicas left.
NEWS_SECONDS = 0.2
# So many tokens of a prompt's end stand before the first token of each of its samples.
CONTEXT_TOKENS = 8
# Tokens of a prompt that may be drafted from.
PROMPT_TOKENS = 4096
# Of the passes in which no draft pays, one in so many tries some drafts.
PROBE_PASSES = 32
# At most so many samples that are out of the batch are kept, in case they come back.
AWAY_SAMPLES = 1024
# Prompts to forget are looked for when there are twice as many prompts as were kept last time, and at least so many.
FEW_PROMPTS = 1024


# A sample is known by a length, and the last tokens at that length.
Known = tuple[int, bytes]


@dataclass(eq=False)
class Group:
    """The samples of one prompt: the steps in which the prompt was met lately, the node of the prompt's last token, and
    the node of the newest token of all."""

    number: int
    steps: list[int]
    prompt_end: int = NOWHERE
    newest: int = NOWHERE


@dataclass(eq=False)
class Running:
    """A sample that is being generated: its mark `known`, by which the drafter finds the sample again, `length` tokens
    with its prompt, and `end`, its last node in the history. The shelf has all its tokens but `tokens`, which follow
    `context`. While the sample is in `row`, the drafter's `Rows` know better, and have its newest tokens."""

    prompt: PromptDigest
    group: Group
    context: Tokens
    length: int
    end: int
    known: bytes = b""
    tokens: array = field(default_factory=lambda: array("i"))
    tried: int = 0
    expected: float = 0.0
    row: int = NOWHERE


def known_by(tokens: Tokens, length: int) -> bytes:
    """Return the last KNOWN_TOKENS of the first `length` tokens, as bytes."""
    return tokens[max(length - KNOWN_TOKENS, 0) : length].tobytes()


def largest_graph(compilation: Any) -> int:
    """Return the tokens of the largest pass for which vLLM captured a graph; 0 where it captured none."""
    if str(compilation.cudagraph_mode or "NONE").rpartition(".")[2] == "NONE":
        return 0
    return int(compilation.max_cudagraph_capture_size or 0)


class HistoryProposer:
    """The drafter of one engine; engine.py makes its arguments."""

    def __init__(self, vllm_config: Any):
        # vLLM takes the drafts of one worker of an engine for all its workers.
        self._speaks = vllm_config.parallel_config.rank == 0
        if not self._speaks:
            return
        block = vllm_config.additional_config[BLOCK]
        self._most = vllm_config.speculative_config.num_speculative_tokens
        self._longest = vllm_config.model_config.max_model_len
        # vLLM settles its graphs after it made the drafter.
        self._compilation = vllm_config.compilation_config
        ends = getattr(vllm_config.model_config.hf_config, "eos_token_id", None)
        ends = np.array([end for end in (ends if isinstance(ends, list) else [ends]) if end is not None], np.int64)
        self._table = Rows(self._longest, ends)
        self._pays = Pays() if block["auto"] else None
        self._history = History.of_bytes(block["history_bytes"])
        self._prompts = Prompts()
        self._groups: dict[int, Group] = {}
        self._few = FEW_PROMPTS
        self._epochs = block["epochs"]
        self._rows: dict[int, Running] = {}
        self._away: dict[Known, Running] = {}
        self._passes: list[passes.ForwardPass] = []
        self._ended: list[PastSample] = []
        self._looked = self._passed = 0.0
        self._step = 0
        self._proposals = 0
        # Whether the steps of groups may have changed since the last drafts.
        self._visited = False
        self._broken = False
        self._lock = threading.Lock()
        folder = Path(vllm_config.speculative_config.draft_load_config.download_dir)
        vocabulary = vllm_config.model_config.get_vocab_size()
        self._shelf = Shelf(folder, block["history_bytes"], self._longest, vocabulary)
        self._counts = folder / f"{self._shelf.name}{passes.PASSES_SUFFIX}"
        compile_kernels()
        self._look()
        self._start_writing()

    def _start_writing(self) -> None:
        threading.Thread(target=self._write_forever, name="verl-fuse-speculation", daemon=True).start()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Tokens,
        token_ids_cpu: Tokens,
        **kwargs: Any,
    ) -> list[list[int]]:
        """Return drafts for each row of the batch, after the tokens that the row has by now; none for a row whose
        prompt is not computed yet."""
        if not self._speaks or self._broken:
            return [[] for _ in sampled_token_ids]
        try:
            with self._lock:
                return self._propose(sampled_token_ids, num_tokens_no_spec, token_ids_cpu)
        except Exception:
            # A drafter that fails costs its drafts, not the engine.
            logger.exception("verl-fuse: drafting failed and ends; this engine goes on without drafts")
            self._broken = True
            return [[] for _ in sampled_token_ids]

    def _propose(self, sampled: Sequence[Sequence[int]], lengths: Tokens, rows: Tokens) -> list[list[int]]:
        table, rows = self._table, np.ascontiguousarray(rows, np.int32)
        if len(rows) > len(table.length):
            table.fit(len(rows))
        counts = np.fromiter(map(len, sampled), np.int64, len(sampled))
        lengths = np.asarray(lengths[: len(sampled)], np.int64)
        changed, skipped = table.look(rows, lengths, counts)
        decodes = self._match(lengths - counts, rows, skipped) if changed else True
        table.grow(self._history, rows, lengths, counts, self._step)
        self._count(counts, decodes)
        if self._visited:
            # A step that is announced again, or an earlier step, leaves a group without any step.
            for row, running in self._rows.items():
                table.since[row] = (running.group.steps or [self._step])[0]
            self._visited = False
        least = LEAST_CHANCE if self._pays is None else self._pays.least
        # Where no draft pays, a pass now and then tries some, or the drafter would never see that drafts pay again.
        self._proposals += 1
        most = self._most if least < 1.0 or self._proposals % PROBE_PASSES == 0 else 0
        if 0 < len(self._rows) <= (graph := largest_graph(self._compilation)):
            # A pass of more tokens than the largest graph has would take several times as long.
            most = min(most, graph // len(self._rows) - 1)
        return table.draft(self._history, counts, most, least)

    def _match(self, starts: Tokens, rows: Tokens, skipped: bool) -> bool:
        """Find the sample of each row that has another one than in the last pass; return whether all samples were in
        it. `starts` are the tokens of each row before the new ones; `skipped`: vLLM made passes without asking for
        drafts."""
        found = self._table.found
        unmet = [running for row, running in self._rows.items() if found[row] != STAYS]
        for running in unmet:
            self._lift(running)
            del self._rows[running.row]
            self._table.free(running.row)
            running.row = NOWHERE
        moved = np.flatnonzero(found == OTHER).tolist()
        if moved and not self._rows:
            # No sample of the pass before is left in its row: another step may have begun, however recent the last look
            # was.
            self._looked = 0.0
        waiting: dict[Known, list[Running]] = {}
        for running in unmet:
            waiting.setdefault((running.length, running.known), []).append(running)
        # In the passes without drafts, a sample has grown since the drafter saw it.
        grown = {length for length, _ in waiting} if skipped else set()
        for row in moved:
            start, running = int(starts[row]), None
            for length in (start, *grown):
                if length <= start and (running := self._take((length, known_by(rows[row], length)), waiting)):
                    break
            self._place(row, self._begin(rows[row], start) if running is None else running)
        gone = {running for running in unmet if running.row == NOWHERE}
        self._end(gone)
        self._put_away(gone)
        return {self._rows[row] for row in moved} <= set(unmet)

    def _place(self, row: int, running: Running) -> None:
        self._rows[row], running.row, self._visited = running, row, True
        number, tried, expected = running.group.number, running.tried, running.expected
        self._table.place(row, running.length, running.end, number, tried, expected)

    def _lift(self, running: Running) -> None:
        """Write into a sample that is in a row what the table knows better."""
        table, row = self._table, running.row
        running.length, running.end, running.known = int(table.length[row]), int(table.end[row]), table.known(row)
        running.tried, running.expected = int(table.tried[row]), float(table.expected[row])
        running.tokens.frombytes(table.take(row))
        running.group.newest = max(running.group.newest, running.end)

    def _take(self, known: Known, waiting: dict[Known, list[Running]]) -> Running | None:
        """Return a sample with this mark: a sample of the last pass, or a sample that was left out since."""
        if waiting.get(known):
            return waiting[known].pop()
        return self._away.pop(known, None)

    def _put_away(self, gone: set[Running]) -> None:
        """Keep the state of a sample that may come back; of too many samples, the first to leave are given up."""
        for running in gone:
            running.tried, running.expected = 0, 0.0
            self._away[running.length, running.known] = running
        while len(self._away) > AWAY_SAMPLES:
            del self._away[next(iter(self._away))]

    def _begin(self, row: Tokens, start: int) -> Running:
        """Return the sample of `row`, which has `start` tokens with its prompt and is met for the first time."""
        if time.monotonic() - self._looked > NEWS_SECONDS:
            self._look()
        prompt = self._prompts.find(row[:start])
        group = self._visit(prompt, self._step)
        if not self._history.holds(group.prompt_end):
            first = max(prompt.length - PROMPT_TOKENS, 0)
            group.prompt_end = self._history.add(row[first : prompt.length], group.number, self._step)
        context = row[max(prompt.length - CONTEXT_TOKENS, 0) : prompt.length].copy()
        running = Running(prompt, group, context, prompt.length, self._add(context, group, self._step))
        # A sample that came from another replica has these tokens already.
        self._grow(running, row, start)
        return running

    def _visit(self, prompt: PromptDigest, step: int) -> Group:
        """Return the group of `prompt`, which is met in `step`. A run that goes on from a checkpoint may find samples
        of steps to come."""
        number = self._prompts.number(prompt)
        if number not in self._groups:
            self._forget()
            self._groups[number] = Group(number, [])
        group = self._groups[number]
        steps = {*group.steps, step}
        group.steps = sorted(found for found in steps if found <= self._step)[-self._epochs - 1 :]
        self._visited = True
        return group

    def _forget(self) -> None:
        """Give up prompts of which the history holds nothing, once these may be half of all prompts."""
        if len(self._groups) < self._few:
            return
        needed = {running.group.number for running in (*self._rows.values(), *self._away.values())}
        gone = [
            number
            for number, group in self._groups.items()
            if number not in needed and not self._history.holds(group.newest)
        ]
        self._prompts.forget(gone)
        for number in gone:
            del self._groups[number]
        self._few = max(2 * len(self._groups), FEW_PROMPTS)

    def _add(self, tokens: Tokens, group: Group, step: int, end: int = NOWHERE) -> int:
        group.newest = self._history.add(tokens, group.number, step, end)
        return group.newest

    def _grow(self, running: Running, row: Tokens, length: int) -> None:
        """Take in the tokens that a sample has from elsewhere."""
        tokens = row[running.length : length]
        running.end = self._add(tokens, running.group, self._step, running.end)
        running.tokens.frombytes(np.ascontiguousarray(tokens, np.int32).tobytes())
        running.length = length

    def _count(self, counts: Tokens, decodes: bool) -> None:
        """Account for the pass that has just ended; only a pass that `decodes` and does nothing else tells the cost of
        a pass."""
        now, last = time.perf_counter(), self._passed
        self._passed = now
        if not self._rows:
            return
        # Rows without new tokens are free.
        new, tokens, rows = counts > 0, int(counts.sum()), len(self._rows)
        tried = int(self._table.tried[: len(counts)][new].sum())
        least = LEAST_CHANCE if self._pays is None else self._pays.least
        self._passes.append(passes.ForwardPass(time.time(), self._step, rows, tokens, tried, least))
        if self._pays is not None and decodes and 0 < last < now:
            expected = float(self._table.expected[: len(counts)][new].sum())
            self._pays.observe(now - last, rows, tried, tokens - rows, expected)

    def _end(self, ended: set[Running]) -> None:
        for running in ended:
            if running.row != NOWHERE:
                self._lift(running)
            if not running.tokens:
                continue
            tokens = np.array(running.tokens, np.int32)
            self._ended.append(PastSample(running.prompt, self._step, running.context, tokens))
            # A sample that comes back is left for others from here on.
            running.context, running.tokens = np.concatenate([running.context, tokens])[-CONTEXT_TOKENS:], array("i")

    def _look(self) -> None:
        """Read the step, and take in the samples that other replicas left."""
        self._looked = time.monotonic()
        self._visited = True
        try:
            self._step = self._shelf.step()
            for sample in self._shelf.news():
                group = self._visit(sample.prompt, sample.step)
                end = self._add(sample.context, group, sample.step)
                self._add(sample.tokens, group, sample.step, end)
        except OSError as error:
            logger.warning("verl-fuse: what other engines left for this one's drafts cannot be read: %s", error)

    def _write_forever(self) -> None:
        while True:
            time.sleep(IDLE_SECONDS / 2)
            try:
                self.write()
            except OSError as error:
                # A full disk costs the samples and passes to be written, not the rollout.
                logger.warning("samples and passes were not left in %s: %s", self._counts.parent, error)

    def write(self) -> None:
        """Leave the ended samples for other drafters, and the passes for the driver."""
        with self._lock:
            if self._passed and time.perf_counter() - self._passed > IDLE_SECONDS:
                self._end(set(self._rows.values()))
            counted, self._passes = self._passes, []
            ended, self._ended = self._ended, []
        if counted:
            passes.append(self._counts, counted)
        if ended:
            self._shelf.put(ended)
