"""The agent `heavy_tail` generates as many tokens as the bench's plan gives, whatever the model does."""

from typing import Any

from bench_plan import length
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@register("heavy_tail")
class HeavyTailAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        tokens = length(int(kwargs["global_steps"]), int(kwargs["index"]), int(kwargs["session_id"]))
        return await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, priority, **kwargs)
