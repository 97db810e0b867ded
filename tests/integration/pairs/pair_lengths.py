"""How long the responses of a row of pairs are, and what they are worth: the same in every row."""

# Tokens from which a response counts as long; a quarter of them is. So long that all others are known to
# be finished well before.
LONG = 400
LONGEST = 640


def length(index: int, session: int) -> int:
    """Tokens of sample `session` of the prompt with data set index `index`."""
    if (index + session) % 4 == 0:
        return LONG + (53 * index + 29 * session) % (LONGEST - LONG)
    return 6 + (11 * index + 7 * session) % 31


def compute_score(data_source: str, solution_str: str, ground_truth: str, **_: object) -> float:
    """Reward of a response, by its length alone: most prompts have good and bad ones, some have equal ones only."""
    return float(len(solution_str) % 3 == 0)
