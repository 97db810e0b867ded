"""The agent `forced_reward` generates as many tokens as the bench's plan gives, and gives rewards that are equal in the
groups that the plan names, 0 and 1 in turns in the others."""

from typing import Any

from bench_plan import group, length, plan
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@register("forced_reward")
class ForcedRewardAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        step, prompt, session = (int(kwargs[name]) for name in ("global_steps", "index", "session_id"))
        tokens = length(step, prompt, session)
        output = await super().run({**sampling_params, "max_tokens": tokens, "ignore_eos": True}, priority, **kwargs)
        equal = prompt in plan()["equal"][group(step)]
        output.reward_score = float((prompt if equal else session) % 2)
        return output
