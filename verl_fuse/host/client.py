"""verl's rollout client, recording every request as a span on its replica's track."""

from contextvars import ContextVar
from typing import Any

from verl.workers.rollout.llm_server import LLMServerClient
from verl.workers.rollout.replica import TokenOutput

from verl_fuse.host.spans import Recorder, Stopwatch, remote_recorder
from verl_fuse.spec.timeline import Span

# generate() acquires its server inside verl's code, in the same task: a context variable carries the choice out.
_server: ContextVar[str] = ContextVar("verl_fuse_server", default="unknown")


class FuseLLMServerClient(LLMServerClient):
    """Behaves like verl's synchronous client; `replicas` maps a server address to its replica's rank."""

    def __init__(
        self, config: Any, load_balancer_handle: Any = None, replicas: dict[str, int] | None = None, **kwargs: Any
    ):
        super().__init__(config=config, load_balancer_handle=load_balancer_handle, **kwargs)
        self._replicas = replicas or {}
        self._recorder: Recorder | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_recorder": None}

    async def _acquire_server(self, request_id: str, **extra: Any) -> tuple[str, Any]:
        server_id, handle = await super()._acquire_server(request_id, **extra)
        _server.set(server_id)
        return server_id, handle

    async def generate(self, request_id: Any, *, prompt_ids: list[int], **kwargs: Any) -> TokenOutput:
        if self._recorder is None:
            self._recorder = remote_recorder()
        args: dict[str, str | int | float] = {"prompt_tokens": len(prompt_ids)}
        watch = Stopwatch()
        try:
            output = await super().generate(request_id, prompt_ids=prompt_ids, **kwargs)
            args |= {"response_tokens": len(output.token_ids), "stop_reason": str(output.stop_reason)}
            return output
        except BaseException as error:
            args["error"] = type(error).__name__
            raise
        finally:
            server = _server.get()
            track = f"replica {self._replicas.get(server, server)}"
            self._recorder.add(Span("request", track, "generate", watch.start, watch.now, args))
