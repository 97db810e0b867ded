"""How long responses of the agent `drifting` (drifting_agent.py) are; AGENTS names it, as verl's
`agent_loop_config_path`."""

# From this step on one prompt's responses are long, and all others are short; before they are about equally long.
DRIFTED = 7
AGENTS = "- {name: drifting, _target_: drifting_agent.DriftingAgentLoop}\n"


def tokens(step: int, prompt: int, sample: int) -> int:
    """Of one response; `prompt` is its number in the data set."""
    if step < DRIFTED:
        return 140 + sample + 3 * prompt
    return 200 + sample if prompt == 0 else 3 + sample % 2
