"""Agent `long_tail`: generates a fixed number of tokens per sample, whatever the model says."""

from typing import Any

from forced_lengths import forced_length
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@register("long_tail")
class LongTailAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        length = forced_length(int(kwargs["index"]), int(kwargs["session_id"]))
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, priority, **kwargs)
