"""Agent `stream_tail`: one long response in twelve groups, and rewards of 0 and 1 in most groups, whatever the model
says."""

from typing import Any

from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

LONG = 950


@register("stream_tail")
class StreamTailAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        index, session = int(kwargs["index"]), int(kwargs["session_id"])
        tokens = LONG if session == 3 and index % 12 == 0 else 8 + (3 * index + 5 * session) % 25
        output = await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, priority, **kwargs)
        output.reward_score = float((session + index) % 2 if index % 3 else index % 2)
        return output
