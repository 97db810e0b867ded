"""Agent `pair_tools`: verl's tool agent, which calls the task's calculator after a first turn of forced length and then
generates what is left of the response; with the row's own sampling parameters ($PAIR_SAMPLING)."""

import json
import os
from typing import Any

from pair_lengths import LONGEST, length
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.tool_agent_loop import AgentData, AgentState, ToolAgentLoop
from verl.experimental.agent_loop.tool_parser import FunctionCall

FIRST_TURN = 4
# The calculator's answer and what ends a turn.
CONTEXT = 8
CALL = FunctionCall(name="calculator", arguments=json.dumps({"expression": "07-03"}))


@register("pair_tools")
class PairToolAgentLoop(ToolAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        self._left = min(length(int(kwargs["index"]), int(kwargs["session_id"])), LONGEST - CONTEXT)
        own = {"ignore_eos": True, **json.loads(os.environ["PAIR_SAMPLING"])}
        return await super().run({**sampling_params, **own}, priority, **kwargs)

    async def _handle_generating_state(
        self, agent_data: AgentData, sampling_params: dict[str, Any], ignore_termination: bool = False
    ) -> AgentState:
        first = agent_data.assistant_turns == 0
        tokens = min(FIRST_TURN, self._left - 1) if first else self._left
        self._left -= tokens
        # What is generated may look like another call, or no call.
        self.max_assistant_turns = 0 if first else 1
        state = await super()._handle_generating_state(
            agent_data, {**sampling_params, "max_tokens": tokens}, ignore_termination
        )
        if not first:
            return state
        agent_data.tool_calls = [CALL]
        return AgentState.PROCESSING_TOOLS
