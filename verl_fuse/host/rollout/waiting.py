"""Waits for actors of the rollout, never longer than `timeout` seconds (fuse.replica_timeout); an actor that fails or
is late is named."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from verl_fuse.errors import FuseError
from verl_fuse.host.rollout.replica import Replica
from verl_fuse.host.upstream.death import first_line
from verl_fuse.host.upstream.watchdog import is_dead

logger = logging.getLogger(__name__)

# Seconds between two looks at a replica that is to stop, and seconds that it may take to answer a look.
LOOK = 2.0


class Waiting:
    """Waits for answers that the run cannot do without."""

    def __init__(self, timeout: float):
        self._timeout = timeout
        self._late = f"in {timeout:g} s (fuse.replica_timeout)"

    def answer(self, reference: Any, whom: str, seconds: float | None = None) -> Any:
        """Return the answer of the actor `whom`; `seconds` are left of its time (None: all of it)."""
        try:
            return ray.get(reference, timeout=self._timeout if seconds is None else seconds)
        except GetTimeoutError:
            raise FuseError(f"{whom} did not answer {self._late}") from None
        except RayError as error:
            raise FuseError(f"{whom} failed: {first_line(error)}") from error

    def together(self, asked: Mapping[str, Any]) -> list[Any]:
        """Return the answers of several actors; `asked` maps a name to each reference. One wait for all costs the
        driver less than one for each."""
        try:
            return ray.get(list(asked.values()), timeout=self._timeout)
        except GetTimeoutError:
            seconds = 0.0
        except RayError:
            seconds = self._timeout
        # The error names the actor whose answer is missing.
        return [self.answer(reference, whom, seconds) for whom, reference in asked.items()]


class WaitingForReplicas(Waiting):
    """Waits for replicas too; `fail(replica, why, cause)` decides the fate of one that does not answer."""

    def __init__(self, timeout: float, fail: Callable[[Replica, str, Exception | None], None]):
        super().__init__(timeout)
        self._fail = fail

    def answers(self, question: Callable[[Any], Any], replicas: Iterable[Replica]) -> dict[Replica, Any]:
        """Return the answers to `question` from inside the servers that answer."""
        found = {}
        for replica, answer in {replica: replica.server.__ray_call__.remote(question) for replica in replicas}.items():
            try:
                found[replica] = ray.get(answer, timeout=self._timeout)
            except GetTimeoutError:
                self._fail(replica, f"did not answer {self._late}", None)
            except RayError as error:
                self._fail(replica, f"failed: {first_line(error)}", error)
        return found

    def undone(self, calls: Mapping[Replica, Coroutine]) -> dict[Replica, str]:
        """Run the call of every replica; return the reasons of replicas that did not finish it."""

        async def together() -> list[str]:
            return await asyncio.gather(*map(self._undone, calls, calls.values()))

        reasons = asyncio.run(together())
        return {replica: why for replica, why in zip(calls, reasons, strict=True) if why}

    async def _undone(self, replica: Replica, call: Coroutine) -> str:
        """Wait for one call; return "" or the reason why it is undone. A server may wait for ever for an engine that
        dies meanwhile, so the server is asked at intervals."""
        doing = asyncio.ensure_future(call)
        deadline = time.monotonic() + self._timeout
        try:
            while not doing.done() and (left := deadline - time.monotonic()) > 0:
                await asyncio.wait([doing], timeout=min(LOOK, left))
                if not doing.done() and await asyncio.to_thread(is_dead, replica.server, LOOK):
                    return ": it is dead"
            if not doing.done():
                return f" {self._late}"
            doing.result()
            return ""
        except RayError as error:
            logger.error("%s failed", replica, exc_info=error)
            return f": {first_line(error)}"
        finally:
            doing.cancel()
