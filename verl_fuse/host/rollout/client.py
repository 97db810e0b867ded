"""Extends verl's rollout client: every request is a span on its replica's track, and a request whose replica leaves the
rollout, or dies, goes on at another replica.

A replica whose answer cannot be true counts as dead once another replica has answered the same request well; where the
other's answer is as strange, or there is no other, weights or prompt make it so, and the answer is handed on like
verl's. Tokens that a dead replica had generated are lost: its requests start again, which favours short responses a
little, once. A request that cannot go on elsewhere (resume.py) starts
again too when its replica leaves: the driver is told of such requests before they are sent, and leaves their replicas
alone, but a request may arrive while its replica is being freed.
"""

import asyncio
import logging
from contextvars import ContextVar
from functools import cached_property, partial
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from verl.utils import normalize_token_ids
from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import Stopwatch, collector
from verl_fuse.host.rollout.prompts import PromptGroup, current_group
from verl_fuse.host.rollout.resume import garbage, merge, obstacles, remaining_params, token_budget
from verl_fuse.host.rollout.transfer import Transfers, has_connector
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.vllm import is_death
from verl_fuse.spec.timeline import ABORTED, REQUEST, WARM_REQUEST, Span

logger = logging.getLogger(__name__)

# generate() acquires its server inside verl's code, in the same task: a context variable carries the choice out.
UNKNOWN = "unknown"
# Seconds after which a server that was out of reach is asked again.
OUT_OF_REACH = 1.0
_server: ContextVar[str] = ContextVar("verl_fuse_server", default=UNKNOWN)
# This variable says inside generate() whether the request that is about to be sent can move.
_stuck: ContextVar[bool] = ContextVar("verl_fuse_stuck", default=False)
# Servers that another one is asked beside, and how often the balancer is asked for another one: it may prefer a server
# that answers at once.
_doubted: ContextVar[frozenset[str]] = ContextVar("verl_fuse_doubted", default=frozenset())
MOST_ASKED = 64


class FuseLLMServerClient(LLMServerClient):
    """Behaves like verl's synchronous client as long as no request is aborted; `replicas` maps a server
    address to its replica's rank, and there are never more than `standalone` other replicas, whose tracks are named
    after their addresses.

    A prefix of at least `warm_prefix_tokens` (None: none) is prefilled by one request before the samples of its prompt
    are asked for. Where the engines have a KV connector, plugins choose the parameters that the connector gets with a
    request.
    """

    def __init__(
        self,
        config: Any,
        load_balancer_handle: Any = None,
        replicas: dict[str, int] | None = None,
        standalone: int = 0,
        warm_prefix_tokens: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self._replicas, self._standalone = replicas or {}, standalone
        self._warm_prefix_tokens = warm_prefix_tokens
        self._transfers = Transfers(config) if has_connector(config) else None

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_run"}

    @cached_property
    def _run(self) -> Any:
        """Return the run's collector of spans, found by the process that asks."""
        return collector()

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        group = current_group()
        prompt = {} if group is None else {"prompt_uid": group.uid}
        server_id, handle = await self._acquired(request_id, {**extra, **prompt})
        refused: list[str] = []
        try:
            while server_id in _doubted.get() and len(refused) < MOST_ASKED:
                refused.append(server_id)
                # The replica that the prompt is assigned to is the one in doubt.
                server_id, handle = await self._acquired(f"{request_id} again {len(refused)}", extra)
        finally:
            for each in refused:
                self._release_server(each, request_id=request_id)
        _server.set(server_id)
        if _stuck.get():
            try:
                # The driver knows of the request before the server has it.
                await self._run.hold.remote(server_id)
            except BaseException:
                self._release_server(server_id, request_id=request_id)
                raise
        return server_id, handle

    async def _acquired(self, request_id: str, known: dict[str, Any]) -> tuple[str, Any]:
        acquiring = asyncio.ensure_future(super()._acquire_server(request_id, **known))
        try:
            return await asyncio.shield(acquiring)
        except BaseException:
            # verl gives back a server that it has been given. An agent may give the request up before, and the load
            # balancer would count it for ever.
            acquiring.add_done_callback(partial(self._give_back, request_id))
            raise

    def _give_back(self, request_id: str, acquired: asyncio.Future) -> None:
        if not acquired.cancelled() and acquired.exception() is None:
            self._release_server(acquired.result()[0], request_id=request_id)

    async def generate(
        self, request_id: Any, *, prompt_ids: list[int], sampling_params: dict[str, Any], **kwargs: Any
    ) -> TokenOutput:
        prompt_ids = normalize_token_ids(prompt_ids)
        _doubted.set(frozenset())
        await self._warm(current_group(), prompt_ids, sampling_params, kwargs)
        budget = token_budget(sampling_params, len(prompt_ids), self.config.actor_rollout_ref.rollout)
        stuck = obstacles(sampling_params)
        aborted: list[TokenOutput] = []
        parts: list[TokenOutput] = []
        tokens: list[int] = []
        doubts: dict[str, str] = {}
        wanted, source = sampling_params, None
        while True:
            try:
                output = await self._attempt(request_id, [*prompt_ids, *tokens], wanted, len(tokens), source, kwargs)
            except ActorUnavailableError as error:
                # Ray says so of a server whose node is gone, too, until it knows of that: the next attempt meets a dead
                # server, or one that can be reached again. Each attempt is a request of its own to the engine: vLLM
                # adds random letters to its name.
                if _server.get() == UNKNOWN:
                    raise
                self._log_out_of_reach(request_id, error)
                await asyncio.sleep(OUT_OF_REACH)
                continue
            except RayError as error:
                if _server.get() == UNKNOWN or not is_death(error):
                    raise
                await self._cut_off(_server.get(), f"is dead: {first_line(error)}")
                continue
            fault = garbage(output)
            if fault and not doubts:
                doubts[_server.get()] = fault
                _doubted.set(frozenset(doubts))
                continue
            if fault:
                self._log_strange(request_id, {**doubts, _server.get(): fault})
            elif output.stop_reason not in ABORTED:
                # A replica that turns a request away is no witness.
                for server, why in doubts.items():
                    await self._cut_off(server, f"answers garbage: {why}")
                doubts = {}
            if not parts and output.stop_reason not in ABORTED:
                return output
            if output.stop_reason not in ABORTED or len(tokens) + len(output.token_ids) >= budget:
                return merge([*parts, output])
            aborted.append(output)
            self._require_progress(request_id, aborted)
            if stuck:
                if output.token_ids:
                    self._log_restart(request_id, stuck, len(output.token_ids))
                continue
            parts.append(output)
            tokens += output.token_ids
            wanted = remaining_params(sampling_params, budget, len(tokens))
            source = self._replicas.get(_server.get())

    def _log_strange(self, request_id: Any, faults: dict[str, str]) -> None:
        logger.warning(
            "request %s: %s; no replica answers otherwise, so the answer is handed on as verl does",
            request_id, ", ".join(f"replica {self._replicas.get(each, each)}: {why}" for each, why in faults.items()),
        )  # fmt: skip

    def _log_out_of_reach(self, request_id: Any, error: RayError) -> None:
        logger.warning(
            "request %s is sent again: replica %s is out of reach: %s",
            request_id, self._replicas.get(_server.get(), _server.get()), first_line(error),
        )  # fmt: skip

    def _log_restart(self, request_id: Any, stuck: dict[str, Any], lost: int) -> None:
        reasons = ", ".join(f"{key}={value!r}" for key, value in sorted(stuck.items()))
        logger.warning(
            "request %s starts again at another replica, without its %d tokens so far: replica %s was freed, and %s "
            "cannot be applied to a part of a response",
            request_id, lost, self._replicas.get(_server.get(), _server.get()), reasons,
        )  # fmt: skip

    async def _warm(
        self, group: PromptGroup | None, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict
    ) -> None:
        """Return once the prefix of this prompt is in its replica's cache; the first of the
        prompt's samples asks for it. Prompts of later turns are those of one sample, and are not asked for."""
        if group is None or self._warm_prefix_tokens is None:
            return
        first, group.begun = not group.begun, True
        if first and len(prompt_ids) >= self._warm_prefix_tokens:
            group.warmed = asyncio.create_task(self._prefill(group, prompt_ids, sampling_params, kwargs))
        if group.warmed is not None:
            await asyncio.shield(group.warmed)

    async def _prefill(
        self, group: PromptGroup, prompt_ids: list[int], sampling_params: dict[str, Any], kwargs: dict
    ) -> None:
        params = {**remaining_params(sampling_params, 1, 0), "min_tokens": 0}
        if self._transfers is not None:
            params = self._transfers.tell(params, group, f"warm {group.uid}", len(prompt_ids))
        watch = Stopwatch()
        args: dict[str, str | int | float] = {"prompt": group.uid, "prompt_tokens": len(prompt_ids)}
        _server.set(UNKNOWN)
        # Only the prefix counts: this request may be aborted at any time.
        _stuck.set(False)
        try:
            output = await super().generate(
                f"warm {group.uid}", prompt_ids=prompt_ids, sampling_params=params, **dict(kwargs)
            )
            args |= _cached(output)
        except RayError as error:
            # The samples' own requests meet the same replica, and handle a dead replica.
            args["error"] = type(error).__name__
            logger.warning("the prefix of prompt %s was not warmed: %s", group.uid, first_line(error))
        finally:
            self._record(WARM_REQUEST, watch, args)

    async def _cut_off(self, server: str, why: str) -> None:
        """Route no request to a dead server again; the server's requests start again elsewhere, each from the tokens
        that reached this client."""
        logger.error("replica %s %s", self._replicas.get(server, server), why)
        self._run.cut_off.remote(server)
        await self._load_balancer.remove_servers.remote([server])

    def _require_progress(self, request_id: Any, parts: list[TokenOutput]) -> None:
        # A freed replica gets no new request before it turns requests away, so each replica can turn a request away
        # once.
        tries = len(self._replicas) + self._standalone + 1
        if len(parts) > tries and not any(part.token_ids for part in parts[-tries:]):
            raise FuseError(
                f"request {request_id}: {tries} replicas in a row turned it away, the last one at {_server.get()}"
            )

    async def _attempt(
        self,
        request_id: Any,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        resumed: int,
        source: int | None,
        kwargs: dict,
    ) -> TokenOutput:
        """Send one request to one replica; the last `resumed` tokens of `prompt_ids` were generated by earlier
        attempts, the last attempt at replica `source`."""
        args: dict[str, str | int | float] = {"prompt_tokens": len(prompt_ids)}
        if group := current_group():
            args["prompt"] = group.uid
        if resumed:
            args["resumed_tokens"] = resumed
        stuck = obstacles(sampling_params)
        if stuck:
            args["unmovable"] = ", ".join(sorted(stuck))
        params = dict(sampling_params)
        if self._transfers is not None:
            params = self._transfers.tell(params, group, str(request_id), len(prompt_ids), resumed, source)
        watch = Stopwatch()
        _server.set(UNKNOWN)
        _stuck.set(bool(stuck))
        try:
            output = await super().generate(request_id, prompt_ids=prompt_ids, sampling_params=params, **kwargs)
            args |= {"response_tokens": len(output.token_ids), "stop_reason": str(output.stop_reason)}
            args |= _cached(output)
            return output
        except BaseException as error:
            args["error"] = type(error).__name__
            if isinstance(error, asyncio.CancelledError) and _server.get() != UNKNOWN:
                self._run.give_up.remote(_server.get())
            raise
        finally:
            if stuck and _server.get() != UNKNOWN:
                self._run.let_go.remote(_server.get())
            self._record(REQUEST, watch, args)

    def _record(self, name: str, watch: Stopwatch, args: dict[str, str | int | float]) -> None:
        if (server := _server.get()) == UNKNOWN:
            return  # No replica had the request.
        track = f"replica {self._replicas.get(server, server)}"
        span = Span(name, track, "generate", watch.start, watch.now, args)
        self._run.add.remote(span, ray.get_runtime_context().get_node_id())


def _cached(output: TokenOutput) -> dict[str, int]:
    """Return the tokens of the prompt that the engine had in its prefix cache, where the engine reports them."""
    cached = output.extra_fields.get("num_cached_tokens")
    return {} if cached is None else {"cached_tokens": int(cached)}
