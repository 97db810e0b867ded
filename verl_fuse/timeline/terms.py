"""Gives the meaning of the words on the pages, each in one sentence; the glossary in verl_fuse/README.md has the same
words.

Invariant (tests/unit/timeline/test_pages.py): the glossary holds every term with these words.
"""

TERMS = {
    "step": "One training step: generate samples, score them, and update the weights with them.",
    "stage": "A part of the step that the driver waits for, by verl's name for it.",
    "generation": "The driver's stage `gen`: from the batch's start until the driver has every sample.",
    "drain": "The stage in which inference that is still running after generation comes to its end.",
    "sample": "One prompt with one response.",
    "group": "All samples of one prompt.",
    "replica": "One copy of the rollout engine, on devices of its own; it runs many requests.",
    "request": "A sample, or a part of it, that a replica generates.",
    "moved request": "The rest of a sample that began on another replica.",
    "slice": "The devices of one finished replica, which compute inference with weights of their own.",
    "lane": "A queue of calls on some devices, which run one after the other.",
    "rank": "One training process.",
    "device": "The hardware that runs one rank, and a replica or part of one.",
    "inference": "Log-probs and values of finished samples; nothing is generated and nothing is learned.",
    "idle": "Time in which a device computes neither for its replica, slice nor rank.",
    "long tail": "Generation after 80 % of the requests have finished; pages show its share.",
    "survivor": "A replica that goes on generating when the long tail moves; the others are freed.",
    "migration": "The moment at which the requests of the long tail move to the survivors.",
}


def hint(term: str) -> str:
    """Return the `title` attribute of a word on a page."""
    return f'title="{TERMS[term]}"'
