"""Agent `scripted`: generates as many tokens as its prompt's row says; a rollout of no tokens fails."""

from typing import Any

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop


class ScriptedAgentLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params: dict[str, Any], priority: int = 0, **kwargs: Any) -> Any:
        tokens = int(kwargs["lengths"][int(kwargs["session_id"])])
        if not tokens:
            raise RuntimeError("this rollout was to fail")
        return await super().run({**sampling_params, "max_tokens": tokens}, priority, **kwargs)
