"""Common facts of runs of the agent `unmovable` (unmovable_agent.py) and the test that reads the runs; AGENTS names it,
as verl's `agent_loop_config_path`.

Of each prompt's four samples the last is long. In the first step the long ones have parameters with which a request
cannot move, in the second the short ones; from the third on the long ones are longer than the steps before let
expect.
"""

from typing import Any

AGENTS = "- {name: unmovable, _target_: unmovable_agent.UnmovableAgentLoop}\n"
PROMPTS, PER_PROMPT, STEPS = 6, 4, 5
LONG_STUCK, SHORT_STUCK, LONGER = 1, 2, 3
# None of them ends a response early, whatever the model says.
PARAMETERS: list[dict[str, Any]] = [
    {"stop": ["no such text"]},
    {"seed": 11},
    {"presence_penalty": 0.3, "frequency_penalty": 0.2},
]

COUNTING = '''
"""Writes down how many requests vLLM has preempted, after each step."""

import json
import os

import ray

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.events import Generated

HOOK_API = 2
_state = {"trainer": None}


@hookimpl
def fuse_setup(trainer):
    _state["trainer"] = trainer._trainer


def preempted(server):
    from prometheus_client import REGISTRY

    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    found = [sample.value for sample in samples if sample.name == "vllm:num_preemptions_total"]
    tokens = server.engine.vllm_config.cache_config
    return {"preempted": sum(found), "counters": len(found), "tokens": tokens.num_gpu_blocks * tokens.block_size}


@hookimpl
def fuse_event(event):
    if isinstance(event, Generated):
        replicas = _state["trainer"].llm_server_manager.get_replicas()
        counted = ray.get([replica.servers[0].__ray_call__.remote(preempted) for replica in replicas])
        with open(os.environ["PREEMPTIONS"], "a") as file:
            file.write(json.dumps({"step": event.step, "servers": counted}) + "\\n")
'''


def is_long(sample: int) -> bool:
    return sample == PER_PROMPT - 1


def length(step: int, prompt: int, sample: int) -> int:
    """Tokens of a response; `prompt` is its number in the data set."""
    if is_long(sample):
        return 156 + 2 * (prompt % 5) if step < LONGER else 222 + 3 * (prompt % 5)
    return 8 + 5 * (3 * prompt + sample) % 31


def parameters(step: int, prompt: int, sample: int) -> dict[str, Any]:
    """With which the request cannot move; empty for one that can."""
    stuck = (step == LONG_STUCK and is_long(sample)) or (step == SHORT_STUCK and not is_long(sample))
    return PARAMETERS[(prompt + sample) % len(PARAMETERS)] if stuck else {}
