"""Agent `unmovable`: forces the lengths and the sampling parameters of unmovable.py."""

from typing import Any

from unmovable import length, parameters
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class UnmovableAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        which = int(kwargs["global_steps"]), int(kwargs["index"]), int(kwargs["session_id"])
        forced = {"max_tokens": length(*which), "ignore_eos": True, **parameters(*which)}
        return await super().run({**sampling_params, **forced}, priority, **kwargs)
