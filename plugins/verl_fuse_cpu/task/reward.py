"""This is the rule-based reward of the Euclid task:
`reward.custom_reward_function.path=pkg://verl_fuse_cpu.task.reward`.

The whole trace is checked, not only the answer: most random pairs have the divisor 1, so the
answer alone could be guessed.
"""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None, **_: Any
) -> dict[str, float]:
    """Return `acc`, 1.0 if the response is the right trace and answer, else 0.0, and `score`, the same (no partial
    credit).

    verl's reward manager calls this function with keywords and the response decoded without special tokens.
    """
    acc = float(solution_str.strip() == ground_truth)
    return {"score": acc, "acc": acc}
