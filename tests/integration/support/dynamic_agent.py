"""Agent `dynamic`: forced lengths, and rewards of which every third prompt's are all alike, so that dynamic sampling
discards its group. In the step FAILING_STEP, if set, the first sample of every other third prompt fails; from the step
IN_VAIN_FROM on all groups are discarded."""

import os
from typing import Any

from dynamic_sampling import discarded, fails, reward, tokens
from verl.experimental.agent_loop.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class DynamicAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> AgentLoopOutput:
        index, session = int(kwargs["index"]), int(kwargs["session_id"])
        step = int(kwargs["global_steps"])
        if step == int(os.environ.get("FAILING_STEP", 0)) and fails(index, session):
            raise RuntimeError(f"no answer for prompt {index}")
        in_vain = step >= int(os.environ.get("IN_VAIN_FROM", 1 << 30))
        length = {"max_tokens": tokens(index, session), "ignore_eos": True}
        output = await super().run({**sampling_params, **length}, priority, **kwargs)
        output.reward_score = 1.0 if in_vain or discarded(index) else reward(session)
        output.extra_fields["reward_extra_info"] = {}
        return output
