"""Timelines like real ones, made from a seed: skewed requests, stages, lane calls, ranks."""

import random

from verl_fuse.spec.timeline import Span, Timeline

START = 1_760_000_000.0
TOKEN_SECONDS = 0.004


def synthetic_timeline(
    replicas: int = 2,
    ranks: int = 2,
    requests: int = 64,
    *,
    slots: int = 12,
    group: int = 4,
    step: int = 3,
    seed: int = 0,
) -> Timeline:
    """A PPO step with log-normal response lengths; each replica runs at most `slots` requests at once."""
    rng = random.Random(seed)
    spans: list[Span] = []
    free = {replica: [START + 0.2] * slots for replica in range(replicas)}
    for index in range(requests):
        replica = index % replicas
        slot = min(range(slots), key=free[replica].__getitem__)
        tokens = min(4096, max(12, int(rng.lognormvariate(4.6, 0.85))))
        start = free[replica][slot]
        end = start + tokens * TOKEN_SECONDS * rng.uniform(0.95, 1.1)
        free[replica][slot] = end
        args = {"prompt_tokens": rng.randint(30, 90), "response_tokens": tokens, "group": f"p{index // group}"}
        spans.append(Span(f"request {index}", f"replica {replica}", "generate", start, end, args))
    generated = max(max(ends) for ends in free.values())
    spans.append(Span("gen", "step", "stage", START + 0.1, generated + 0.1))
    now = generated + 0.15
    for index, name in enumerate(("ref", "values")):
        begin = START + (generated - START) * (0.35 + 0.25 * index)
        spans.extend(_call(name, "inference", begin, 0.6, ranks, {"micro_group": index, "samples": 16}, rng))
    for name, category, seconds in (
        ("old_log_prob", "inference", 0.9),
        ("ref", "inference", 0.5),
        ("values", "inference", 0.45),
        ("adv", "", 0.05),
        ("update_critic", "train", 1.7),
        ("update_actor", "train", 2.3),
        ("update_weights", "sync", 0.7),
    ):
        stage = "sync" if name == "update_weights" else "stage"
        spans.append(Span(name, "step", stage, now, now + seconds))
        if category:
            spans.extend(_call(name, category, now + 0.02, seconds - 0.05, ranks, {}, rng))
        now += seconds + 0.02
    return Timeline("ppo-cpu synthetic", step, START, now + 0.1, tuple(spans))


def _call(name: str, category, start: float, seconds: float, ranks: int, args: dict, rng: random.Random) -> list[Span]:
    spans = [Span(name, "lane train", category, start, start + seconds, args)]
    for rank in range(ranks):
        worked = seconds * rng.uniform(0.75, 0.97)
        spans.append(Span(name, f"rank {rank}", category, start + 0.01, start + 0.01 + worked, args))
    return spans
