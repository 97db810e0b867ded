"""The actors of the counting engine (counting_engine.py); without verl, so that their processes start at once."""

import asyncio
import math
import os
import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any


@dataclass
class Answer:
    """The fields of verl's TokenOutput."""

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: Any = None
    num_preempted: int | None = None


class Journal:
    """Ray actor: what happened, in order."""

    def __init__(self) -> None:
        self._entries: list[str] = []

    def add(self, entry: str) -> None:
        self._entries.append(entry)

    def entries(self) -> list[str]:
        return self._entries

    def clear(self) -> None:
        self._entries.clear()


class EngineDeadError(Exception):
    """The error that vLLM raises (vllm/v1/engine/exceptions.py) once its engine process is gone."""


class Count:
    """A request's tokens, as vLLM's detokenizer keeps them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.detokenizer = self

    def num_output_tokens(self) -> int:
        return len(self.tokens)


class CountingServer:
    """A decode step of b sequences takes `step_seconds + sequence_seconds * b`; the methods and the gate of verl's vLLM
    server (vllm_async_server.py), and of its engine what is asked for from outside."""

    def __init__(self, name: str, journal: Any, step_seconds: float, sequence_seconds: float = 0.0):
        self._name, self._journal = name, journal
        self._step, self._sequence = step_seconds, sequence_seconds
        self._running: dict[str, Count] = {}
        self.engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=self._running), errored=False)
        # Raised by every abort: what ran before has been aborted.
        self._aborts = 0
        self._as_new()
        self.global_steps = 0

    def _as_new(self) -> None:
        self._closed = self._mute = self._dead = self._garbage = self.engine.errored = False
        self._at_most = math.inf
        self._slowness = 1.0
        self.engine.vllm_config = None

    async def generate(self, prompt_ids: list[int], sampling_params: dict, request_id: str, **_: Any) -> Answer:
        count = Count()
        tokens, aborts = count.tokens, self._aborts
        stop = set(sampling_params.get("stop_token_ids") or ())
        self._running[request_id] = count
        try:
            while len(tokens) < sampling_params["max_tokens"] and not self._closed and aborts == self._aborts:
                await asyncio.sleep(self._slowness * (self._step + self._sequence * len(self._running)))
                # An abort ends a request in vLLM's front end, whatever its engine does.
                while len(tokens) >= self._at_most and not self._dead and not self._closed and aborts == self._aborts:
                    await asyncio.sleep(0.02)
                if self._dead:
                    raise EngineDeadError("EngineCore encountered an issue")
                if not self._closed and aborts == self._aborts:
                    tokens.append([*prompt_ids, *tokens][-1] + 1)
                if tokens and tokens[-1] in stop:
                    break
        finally:
            self._running.pop(request_id, None)
        done = len(tokens) == sampling_params["max_tokens"] or bool(stop & set(tokens[-1:]))
        log_probs = [-token / 1000 for token in tokens]
        if self._garbage and tokens:
            log_probs[0] = float("nan")
        return Answer(
            token_ids=tokens,
            log_probs=log_probs if tokens or done else None,
            stop_reason="completed" if done else "aborted",
            extra_fields={"global_steps": self.global_steps},
        )

    async def abort_all_requests(self, reset_prefix_cache: bool = True, reject_request: bool = False) -> dict:
        if self._mute:
            await asyncio.sleep(3600)
        self._closed = True
        self._aborts += 1
        await self._journal.add.remote(f"abort {self._name} {'reject' if reject_request else 'park'}")
        return {"aborted_count": len(self._running), "request_ids": list(self._running)}

    async def sleep(self) -> None:
        if self._mute:
            await asyncio.sleep(3600)
        await self._journal.add.remote(f"sleep {self._name}")

    async def resume_generation(self) -> None:
        await self._journal.add.remote(f"resume {self._name}")
        self._closed = False

    async def set_global_steps(self, global_steps: int) -> None:
        self.global_steps = global_steps

    async def repair(self) -> None:
        """No fault any more, and everything else as it is."""
        closed = self._closed
        self._as_new()
        self._closed = closed

    async def reopen(self, step_seconds: float | None = None, sequence_seconds: float | None = None) -> None:
        """As new."""
        self._as_new()
        self._step = self._step if step_seconds is None else step_seconds
        self._sequence = self._sequence if sequence_seconds is None else sequence_seconds
        self.global_steps = 0

    async def keep(self, tokens: int) -> None:
        """From now on, say that the KV cache holds so many tokens, in blocks of 16."""
        cache = SimpleNamespace(num_gpu_blocks=tokens // 16, block_size=16)
        self.engine.vllm_config = SimpleNamespace(cache_config=cache)

    async def hang(self) -> None:
        """From now on, answer neither an abort nor a call to sleep."""
        self._mute = True

    async def pause_at(self, tokens: float = 0) -> None:
        """From now on, generate no more than so many tokens of a response, but answer every question."""
        self._at_most = tokens

    async def paused(self) -> int:
        """How many requests wait there."""
        return sum(len(count.tokens) >= self._at_most for count in self._running.values())

    async def block(self, seconds: float) -> None:
        """Answer nothing for so long."""
        time.sleep(seconds)

    async def slow_down(self, factor: float) -> None:
        """From now on, take `factor` times as long for a token."""
        self._slowness = factor

    async def abort_and_go_on(self) -> None:
        """Abort the running requests; new requests are welcome."""
        self._aborts += 1

    async def answer_garbage(self) -> None:
        """From now on, answer with log-probs that are no numbers."""
        self._garbage = True

    async def kill_engine(self) -> None:
        """From now on, as if the engine process were gone; the server lives on."""
        self._dead = self.engine.errored = True

    async def exit(self) -> None:
        os._exit(1)
