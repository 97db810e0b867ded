"""Agent `awkward`: gives requests up before they have a server, waits long for a tool, and ends its process."""

import asyncio
import os
from typing import Any
from uuid import uuid4

from awkward import DEATH, GIVEN_UP, TOOL, TOOL_SECONDS, length
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class AwkwardAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        place, session, step = int(kwargs["place"]), int(kwargs["session_id"]), int(kwargs["global_steps"])
        forced = {**sampling_params, "max_tokens": length(place, session), "ignore_eos": True}
        given_up = 0
        for _ in range(GIVEN_UP):
            request = self.server_manager.generate(uuid4().hex, prompt_ids=[5, 6, 7], sampling_params=dict(forced))
            try:
                await asyncio.wait_for(request, 0.002)
            except TimeoutError:
                given_up += 1
        print(f"{given_up} requests were given up", flush=True)
        if (place, session) == (TOOL, 0):
            await asyncio.sleep(TOOL_SECONDS)
        if (place, session, step) == (0, 0, DEATH):
            os._exit(1)
        return await super().run(forced, priority, **kwargs)
