"""Agent `long_tail`: generates a fixed number of tokens per sample, whatever the model says. The first of the longer
samples of one step cannot move."""

import os
from pathlib import Path
from typing import Any

from forced_lengths import LONGER, STUCK, STUCK_IN_STEP, forced_length
from verl.experimental.agent_loop.agent_loop import register
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


@register("long_tail")
class LongTailAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        length = forced_length(int(kwargs["index"]), int(kwargs["session_id"]))
        forced = {"max_tokens": length, "ignore_eos": True}
        if length >= LONGER and int(kwargs["global_steps"]) == STUCK_IN_STEP and _is_first():
            forced |= STUCK
        return await super().run({**sampling_params, **forced}, priority, **kwargs)


def _is_first() -> bool:
    """Whether nobody has asked before, in any process of this run."""
    folder = Path(os.environ["STEP_RECORD_DIR"])
    folder.mkdir(parents=True, exist_ok=True)
    try:
        (folder / "stuck").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
