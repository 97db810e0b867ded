"""Agent `pairs`: forces the length of every response, with the row's own sampling parameters ($PAIR_SAMPLING)."""

import json
import os
from typing import Any

from pair_lengths import length
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@register("pairs")
class PairAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        tokens = length(int(kwargs["index"]), int(kwargs["session_id"]))
        own = {"max_tokens": tokens, "ignore_eos": True, **json.loads(os.environ["PAIR_SAMPLING"])}
        return await super().run({**sampling_params, **own}, priority, **kwargs)
