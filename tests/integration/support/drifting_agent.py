"""Agent `drifting`: how long responses are changes in the middle of a run (drifting_lengths.py)."""

from typing import Any

from drifting_lengths import tokens
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class DriftingAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        length = tokens(int(kwargs["global_steps"]), int(kwargs["index"]), int(kwargs["session_id"]))
        return await super().run({**sampling_params, "max_tokens": length, "ignore_eos": True}, priority, **kwargs)
