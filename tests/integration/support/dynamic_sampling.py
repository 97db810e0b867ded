"""Common facts of a run with dynamic sampling and the test that reads the run: lengths, rewards, and a plugin that
writes down each step's plan."""

AGENTS = """
- {name: dynamic, _target_: dynamic_agent.DynamicAgentLoop}
- {name: long_tail, _target_: long_tail_agent.LongTailAgentLoop}
"""

WITNESS = '''
"""What each step had for prompts, and what came of them."""

import json
import os

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.events import Generated

HOOK_API = 2


@hookimpl
def fuse_event(event):
    if not isinstance(event, Generated):
        return
    prompts = {
        uid: [prompt.key, None if prompt.prediction is None else prompt.prediction.tokens]
        for uid, prompt in event.prompts.items()
    }
    found = {"responses": event.responses, "discarded": event.discarded}
    with open(os.environ["WITNESS"], "a") as file:
        file.write(json.dumps({"step": event.step, "prompts": prompts, **found}) + "\\n")
'''


def tokens(index: int, session: int) -> int:
    """Tokens of sample `session` of the prompt with data set index `index`."""
    return 20 + 9 * (index % 12) + session


def discarded(index: int) -> bool:
    """Whether all samples of the prompt get the same reward."""
    return index % 3 == 0


def fails(index: int, session: int) -> bool:
    """Whether the sample fails in the step in which samples fail."""
    return index % 3 == 1 and session == 0


def reward(session: int) -> float:
    """Of the samples of any other prompt."""
    return float(session % 2)
