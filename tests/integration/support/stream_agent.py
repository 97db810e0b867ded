"""Agent `stream_tail`: one long response in twelve groups, and rewards of 0 and 1 in most groups, whatever the model
says. The long response is handed over once the other groups were streamed, or MOST seconds have passed."""

import asyncio
import os
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

LONG = 950
# stream_recorder.py writes the file of this name in $STEP_RECORD_DIR once all other groups of the step were streamed.
STREAMED = "streamed"
MOST = 20.0


async def _until_streamed() -> None:
    loop, file = asyncio.get_running_loop(), Path(os.environ["STEP_RECORD_DIR"]) / STREAMED
    end = loop.time() + MOST
    while not file.exists() and loop.time() < end:
        await asyncio.sleep(0.1)


@register("stream_tail")
class StreamTailAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        index, session = int(kwargs["index"]), int(kwargs["session_id"])
        tokens = LONG if session == 3 and index % 12 == 0 else 8 + (3 * index + 5 * session) % 25
        output = await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, priority, **kwargs)
        if tokens == LONG:
            await _until_streamed()
        output.reward_score = float((session + index) % 2 if index % 3 else index % 2)
        return output
