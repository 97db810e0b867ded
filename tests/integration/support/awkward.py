"""Common facts of the run with awkward data and agents, and the test that reads the run."""

AGENTS = "- {name: awkward, _target_: awkward_agent.AwkwardAgentLoop}\n"

# By place in the step: what the data has as `index`, and the samples that the prompt asks for.
INDICES = (None, float("nan"), [1, 2], 7, "q-3", 12)
SAMPLES = (1, 2, 6, 3, 2, 4)
PER_PROMPT = 4
TOOL, GIVEN_UP, DEATH = 5, 6, 2
REPLICA_TIMEOUT = 15.0
# Of the sample that waits for a tool, in seconds.
TOOL_SECONDS = 2.5 * REPLICA_TIMEOUT


def length(place: int, session: int) -> int:
    """Tokens of a sample."""
    return 120 if (place, session) == (TOOL, 0) else 16 + 5 * place + session
