"""Common facts of a long-tail run and the test that reads the run: the lengths, the requests that cannot move, the
time at which an engine is killed, and what engines wait at until it is, or until the tail moves."""

KILLED_IN_STEP = 3
# Parameters with which a request cannot go on at another replica; they end no response early.
STUCK_IN_STEP = 2
STUCK = {"stop": ["no such text"], "seed": 5}
# Tokens from which a response counts as long; one of the four samples of each prompt is.
LONG = 150
# The one that cannot move has so many at least: it must still run when the others are moved.
LONGER = 190
# Tokens with the prompt's nine (held_engines.py): about half of the short responses are complete then, or all.
HELD_FOR_KILL, HELD_FOR_MOVE = 40, 60


def forced_length(index: int, session: int) -> int:
    """Tokens of sample `session` of the prompt with data set index `index`."""
    # Not the same sample of each: replicas take turns, and one would get all the long ones.
    return LONG + 7 * index % 90 if session == index % 4 else 8 + 5 * (3 * index + session) % 41
