"""Tells the prompt that a piece of code works for: to the driver when it submits a batch, and to every request of the
prompt in the agent loops.

verl gives each of a prompt's samples a request id of its own and starts all samples at once. A context variable, set
where an agent-loop worker begins a prompt (agent_loop_tq.py `_run_prompt`), reaches the requests of all its samples,
whatever agent loop makes them.
"""

import asyncio
import hashlib
import inspect
import json
from collections.abc import Callable, Coroutine, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any
from uuid import uuid4

import numpy as np
import ray
from tensordict import NonTensorData, TensorDict

from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.agents import asked
from verl_fuse.host.rollout.waiting import Waiting
from verl_fuse.host.upstream.rows import as_index
from verl_fuse.spec.prompts import Prompt

# Of a prompt's text, to find the prompt by; and of prompts that a message names.
SHOWN_CHARACTERS = 40
SHOWN_PROMPTS = 5
# The parameters of verl's agent-loop workers for a prompt.
_TOLD = {"prompt", "sampling_params", "trajectory"}
# What its prompt and its trajectory have.
_FACTS = {"uid", "validate", "step"}


@dataclass(slots=True)
class PromptGroup:
    """The samples of one prompt in one agent-loop worker; `weights` names the weights that generate them
    (verl_fuse.spec.step.RequestView), `begun` says that a request was sent, and `warmed` is the request that prefills
    their prefix, if there is one."""

    uid: str
    weights: str
    begun: bool = False
    warmed: asyncio.Task | None = None


_group: ContextVar[PromptGroup | None] = ContextVar("verl_fuse_prompt", default=None)


def current_group() -> PromptGroup | None:
    """Return the prompt group that this task works for; None outside an agent loop, or where no prompt is announced."""
    return _group.get()


def announce(agent_loop_manager: Any, timeout: float, *, needed: bool = False) -> None:
    """Let the requests of all agent loops know their prompt: the recorded requests of a prompt are told apart by it.
    A worker that does not answer within `timeout` seconds costs a warning; where that is `needed` it is an error, as
    are workers that are not verl's."""
    telling = partial(announce_prompts, run_id=uuid4().hex)
    if not needed:
        for told in asked(agent_loop_manager, telling, timeout):
            ray.get(told)
        return
    loops = getattr(agent_loop_manager, "agent_loop_workers", None)
    calls = {f"agent-loop worker {n}": loop.__ray_call__.remote(telling) for n, loop in enumerate(loops or ())}
    if loops is None or not all(Waiting(timeout).together(calls)):
        raise FuseError(
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class: a manager with agent_loop_workers that run "
            "prompts as verl's do is needed where requests are to know their prompt (fuse.elastic.enabled=true, or a "
            f"KV connector); {type(agent_loop_manager).__name__} has none"
        )


def announce_prompts(worker: Any, run_id: str) -> bool:
    """Let every request of this agent-loop worker know its prompt, and its weights by run, step, and whether the step
    validates. Return whether the worker runs prompts as verl's does; another one is left as it is. Runs inside the
    worker."""
    run = getattr(worker, "_run_prompt", None)
    if getattr(run, "func", None) is _announced:
        return True
    if run is None or not inspect.signature(run).parameters.keys() >= _TOLD:
        return False
    worker._run_prompt = partial(_announced, run, run_id)
    return True


async def _announced(run: Callable[..., Coroutine], run_id: str, *given: Any, **named: Any) -> Any:
    """Announce the prompt, then call `run`, an agent-loop worker's `_run_prompt`; each call is a task of its own, so
    the variable ends with the call."""
    told = inspect.signature(run).bind_partial(*given, **named).arguments
    trajectory, prompt = told.get("trajectory"), told.get("prompt")
    if isinstance(trajectory, Mapping) and isinstance(prompt, Mapping) and {*trajectory, *prompt} >= _FACTS:
        # The weights are synced between a step's rollout and its validation.
        kind = "validation" if trajectory["validate"] else "step"
        _group.set(PromptGroup(str(prompt["uid"]), f"{run_id} {kind} {trajectory['step']}"))
    return await run(*given, **named)


def prompts_of(batch: TensorDict, samples: int) -> list[Prompt]:
    """Return the prompts of a batch that is about to be submitted; each prompt is generated `samples` times unless the
    batch gives another number."""
    contents = _column(batch, "raw_prompt", len(batch), None)
    counts = samples_of(batch, samples)
    return [
        Prompt(uid, prompt_key(source, content), source, counts[uid])
        for (uid, source), content in zip(sources_of(batch).items(), contents, strict=True)
    ]


def samples_of(batch: TensorDict, samples: int) -> dict[str, int]:
    """Return prompt uid -> its number of samples: `samples`, or the number that the prompt asks for itself. verl fails
    a prompt that asks for no number."""
    uids = [str(uid) for uid in batch["uid"]]
    counts = (as_index(count) for count in _column(batch, "__rollout_n__", len(uids), samples))
    return {uid: count if isinstance(count, int) else samples for uid, count in zip(uids, counts, strict=True)}


def sources_of(batch: TensorDict) -> dict[str, str]:
    """Return prompt uid -> name of its data set, "" where the data has none."""
    uids = [str(uid) for uid in batch["uid"]]
    return dict(zip(uids, map(str, _column(batch, "data_source", len(uids), "")), strict=True))


def places_of(batch: TensorDict) -> dict[str, str]:
    """Return prompt uid -> where a user finds the prompt: its data set, and its index there, or else the beginning of
    its text."""
    count = len(batch)
    sources = _column(batch, "data_source", count, "")
    contents = _column(batch, "raw_prompt", count, None)
    # verl's own column `index` is 0 for every prompt of data without an index.
    infos = _column(batch, "extra_info", count, None)
    found = {}
    for uid, source, info, content in zip(batch["uid"], sources, infos, contents, strict=True):
        index = info.get("index") if isinstance(info, Mapping) else None
        # Where some rows have no index, the others' are floats.
        index = int(index) if isinstance(index, float) and index.is_integer() else index
        named = isinstance(index, int | np.integer | str) and not isinstance(index, bool)
        found[str(uid)] = f"{source} {f'index {index}' if named else _beginning(content)}".strip()
    return found


def shown(places: Mapping[str, str]) -> str:
    """Return the first of these prompts (uid -> `places_of`) for a message."""
    named = [f"{place or 'prompt'} (uid {uid})" for uid, place in islice(places.items(), SHOWN_PROMPTS)]
    return ", ".join(named + ["…"] * (len(places) > SHOWN_PROMPTS))


def _beginning(content: Any) -> str:
    """Return the beginning of a prompt's last message, in quotes; nothing of a prompt that is not known."""
    if content is None:
        return ""
    last = content[-1] if isinstance(content, list | tuple) and content else content
    text = last.get("content", "") if isinstance(last, Mapping) else last
    if isinstance(text, list | tuple):
        # Parts of text, images and others.
        text = " ".join(str(part["text"]) for part in text if isinstance(part, Mapping) and "text" in part)
    text = " ".join(str(text)[: 4 * SHOWN_CHARACTERS].split())
    return json.dumps(text if len(text) <= SHOWN_CHARACTERS else f"{text[:SHOWN_CHARACTERS]}…", ensure_ascii=False)


def prompt_key(source: Any, content: Any) -> str:
    """Return a key that is equal for equal messages of one data set; an image counts by its printed form, so an image
    without a stable form is always new."""
    text = json.dumps([str(source), content], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _column(batch: TensorDict, name: str, count: int, default: Any) -> list[Any]:
    if isinstance(found := batch.get(name, None), NonTensorData):
        return [found.data] * count
    return [default] * count if found is None else list(batch[name])
