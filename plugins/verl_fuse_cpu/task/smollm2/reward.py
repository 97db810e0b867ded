"""This is the rule-based reward of the SmolLM2 task:
`reward.custom_reward_function.path=pkg://verl_fuse_cpu.task.smollm2.reward`.

A response's answer is read by the kind's rule (kinds.py), and reasoning-gym's verifier of the kind's family says
whether it is right. What the verifier gives beside the full mark, for an answer that is nearly right or only contains
the right one, counts as wrong.
"""

import json
from typing import Any

from verl_fuse_cpu.task.smollm2.kinds import BY_NAME, verifier


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Return `acc`, 1.0 if the response's answer is right, else 0.0, and `score`, the same.

    `data_source` is the kind, `ground_truth` the JSON of the problem's answer and metadata (problems.py). verl's reward
    manager calls this function with keywords and the response decoded without special tokens.
    """
    kind = BY_NAME[data_source]
    mark = verifier(kind.family)(kind.read(solution_str), json.loads(ground_truth))
    acc = float(mark >= 1.0)
    return {"score": acc, "acc": acc}
