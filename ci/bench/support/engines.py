"""Emulate engines that take a given time: any number of replicas behind verl's replica interface, all in one process.

A sample takes its length times a pace, on any replica. This module writes the same rows as agent loops
(agent_loop_tq.py): a row of TransferQueue for each sample, with the tags of its tokens and none of the tokens, the
state of each prompt, a span of each request. Rows that end within `TICK` seconds are one call.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from verl_fuse.host.record.spans import remote_recorder
from verl_fuse.spec.timeline import REQUEST, Span

TICK = 0.1
# Every prompt has so many tokens.
PROMPT = 512


@dataclass
class _Place:
    """A replica: the state of its server, and the attributes that others ask for."""

    closed: asyncio.Event = field(default_factory=asyncio.Event)
    running: int = 0
    global_steps: int = 0
    engine: Any = None


class Engines:
    """A Ray actor with the engines of `replicas` replicas, which does the work of agent loops as well."""

    def __init__(self, replicas: int):
        self._places = [_Place() for _ in range(replicas)]
        self._pace = 0.0
        self._ended: list[tuple[str, int, int]] = []
        self._left: dict[str, int] = {}
        self._tasks: set[asyncio.Task] = set()
        self._recorder: Any = None
        self.moved = 0

    async def ask(self, rank: int, name: str, *arguments: Any, **named: Any) -> Any:
        """Call a method that verl calls on the server of a replica."""
        if name == "__ray_call__":
            return arguments[0](self._places[rank], *arguments[1:])
        return await getattr(self, name)(self._places[rank], *arguments, **named)

    async def abort_all_requests(self, place: _Place, reject_request: bool = False) -> dict:
        aborted = place.running
        place.closed.set()
        return {"aborted_count": aborted}

    async def sleep(self, place: _Place) -> None:
        """Do nothing: the replica has no memory."""

    async def resume_generation(self, place: _Place) -> None:
        place.closed.clear()

    async def set_global_steps(self, place: _Place, global_steps: int) -> None:
        place.global_steps = global_steps

    async def begin(self, balancer: Any, prompts: Sequence[str], lengths: Sequence[Sequence[int]], step: int) -> None:
        """Generate the samples of these prompts, with these response lengths."""
        self._recorder, self.moved = remote_recorder(), 0
        self._left = {uid: len(group) for uid, group in zip(prompts, lengths, strict=True)}
        fields = await balancer.require_acquire_fields.remote()
        for uid, group in zip(prompts, lengths, strict=True):
            for session, length in enumerate(group):
                extra = {"prompt_uid": uid} if "prompt_uid" in fields else {}
                self._start(self._sample(balancer, uid, session, length, extra))
        self._start(self._write(prompts, step))

    async def take(self, seconds: float) -> None:
        """Take `seconds` for a token from now on."""
        self._pace = seconds

    async def counted(self) -> int:
        """Return the number of requests of the step that went on elsewhere."""
        return self.moved

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _sample(self, balancer: Any, uid: str, session: int, length: int, extra: dict) -> None:
        tokens = 0
        while tokens < length:
            address, server = await balancer.acquire_server.remote(f"{uid}_{session}", **extra)
            place, begun, wall, before = self._places[server.rank], time.monotonic(), time.time(), tokens
            place.running += 1
            try:
                await asyncio.wait_for(place.closed.wait(), (length - tokens) * self._pace)
                tokens = min(length, before + int((time.monotonic() - begun) / self._pace))
            except TimeoutError:
                tokens = length
            finally:
                place.running -= 1
            self.moved += tokens < length
            await balancer.release_server.remote(address)
            self._tell(server.rank, uid, wall, before, tokens, length)
        self._ended.append((uid, session, length))

    def _tell(self, rank: int, uid: str, begun: float, before: int, tokens: int, length: int) -> None:
        """Record the span of a request, in the form of verl-fuse's client (host/rollout/client.py)."""
        args = {
            "prompt_tokens": PROMPT + before,
            "prompt": uid,
            "response_tokens": tokens - before,
            "stop_reason": "completed" if tokens == length else "aborted",
            "cached_tokens": 0,
            **({"resumed_tokens": before} if before else {}),
        }
        self._recorder.add(Span(REQUEST, f"replica {rank}", "generate", begun, time.time(), args))

    async def _write(self, prompts: Sequence[str], step: int) -> None:
        import torch
        import transfer_queue as tq
        from tensordict import TensorDict

        await tq.async_kv_batch_put(
            keys=list(prompts), partition_id="train", tags=[{"status": "running"}] * len(prompts)
        )
        index = {uid: number for number, uid in enumerate(prompts)}
        while any(self._left.values()):
            await asyncio.sleep(TICK)
            ended, self._ended = self._ended, []
            if not ended:
                continue
            tags = [
                {
                    "status": "success",
                    "prompt_len": PROMPT,
                    "response_len": length,
                    "seq_len": PROMPT + length,
                    "global_steps": step,
                    "min_global_steps": step - 1,
                    "max_global_steps": step - 1,
                }
                for _, _, length in ended
            ]
            fields = TensorDict({"index": torch.tensor([index[uid] for uid, _, _ in ended])}, batch_size=len(ended))
            keys = [f"{uid}_{session}_0" for uid, session, _ in ended]
            await tq.async_kv_batch_put(keys=keys, partition_id="train", fields=fields, tags=tags)
            for uid, _, _ in ended:
                self._left[uid] -= 1
            if done := sorted({uid for uid, _, _ in ended if not self._left[uid]}):
                states = [{"status": "finished"}] * len(done)
                await tq.async_kv_batch_put(keys=done, partition_id="train", tags=states)


class _Method:
    def __init__(self, actor: Any, rank: int, name: str):
        self._call = actor, rank, name

    def remote(self, *arguments: Any, **named: Any) -> Any:
        actor, rank, name = self._call
        return actor.ask.remote(rank, name, *arguments, **named)


class EngineServer:
    """A stand-in for a Ray handle of the server of replica `rank`: `server.method.remote(...)`."""

    def __init__(self, actor: Any, rank: int):
        self.actor, self.rank = actor, rank

    def __getattr__(self, name: str) -> _Method:
        if name.startswith("_") and name != "__ray_call__":
            raise AttributeError(name)
        return _Method(self.actor, self.rank, name)
