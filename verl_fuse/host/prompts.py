"""Which prompt a piece of code works for: known to the driver when it submits a batch, and to every request of that prompt in the agent loops.

verl gives each of a prompt's samples a request id of its own and starts them all at once. A context variable, set where an agent-loop worker
begins a prompt (agent_loop_tq.py `_run_prompt`), reaches the requests of all its samples, whatever agent loop makes them.
"""

import asyncio
import hashlib
import json
from collections.abc import Callable, Coroutine
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDict

from verl_fuse.spec.prompts import Prompt


@dataclass(slots=True)
class PromptGroup:
    """The samples of one prompt in one agent-loop worker; `warmed` is the request that prefills their prefix, once there is one."""

    uid: str
    warmed: asyncio.Task | None = None


_group: ContextVar[PromptGroup | None] = ContextVar("verl_fuse_prompt", default=None)


def current_group() -> PromptGroup | None:
    """The prompt this task works for; None outside an agent loop, or where nobody announces."""
    return _group.get()


def announce_prompts(worker: Any) -> None:
    """Runs inside an agent-loop worker: from now on every request knows its prompt."""
    run = worker._run_prompt
    if not isinstance(run, _Announced):
        worker._run_prompt = _Announced(run)


class _Announced:
    """An agent-loop worker's `_run_prompt`; each call is a task of its own, so the variable ends with it."""

    def __init__(self, run: Callable[..., Coroutine]):
        self._run = run

    async def __call__(self, prompt: dict, *args: Any, **kwargs: Any) -> Any:
        _group.set(PromptGroup(str(prompt["uid"])))
        return await self._run(prompt, *args, **kwargs)


def prompts_of(batch: TensorDict, samples: int) -> list[Prompt]:
    """The prompts of a batch that is about to be submitted, each generated `samples` times unless it says otherwise."""
    count = len(batch)
    sources = _column(batch, "data_source", count, "")
    counts = _column(batch, "__rollout_n__", count, samples)
    contents = _column(batch, "raw_prompt", count, None)
    return [
        Prompt(str(uid), prompt_key(source, content), str(source), int(number))
        for uid, source, content, number in zip(batch["uid"], sources, contents, counts, strict=True)
    ]


def sources_of(batch: TensorDict) -> dict[str, str]:
    """Prompt uid -> name of its data set, "" where the data has none."""
    uids = [str(uid) for uid in batch["uid"]]
    return dict(zip(uids, map(str, _column(batch, "data_source", len(uids), "")), strict=True))


def prompt_key(source: Any, content: Any) -> str:
    """The same for the same messages of the same data set; images count by how they print, so one without a stable form is always new."""
    text = json.dumps([str(source), content], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _column(batch: TensorDict, name: str, count: int, default: Any) -> list[Any]:
    return list(batch[name]) if name in batch.keys() else [default] * count  # noqa: SIM118
