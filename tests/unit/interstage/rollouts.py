"""A step of known costs, played out decode step by decode step, as its timeline."""

import math
from collections import deque

from verl_fuse.spec.timeline import Span, Timeline

PROMPT = 9


def generated(lengths, slots, step, sequence, replica=0, tokens=math.inf):
    """Request spans of one replica that is asked for one sample after the other, all at about time 0; its KV cache
    holds `tokens`, and the last request taken in makes room where they do not suffice, keeps its own and waits
    (vLLM's scheduler)."""
    waiting, running, now, spans = deque((n, 0) for n in range(len(lengths))), {}, 0.0, []

    def held():
        return sum(PROMPT + done for done in running.values())

    while waiting or running:
        while waiting and len(running) < slots and held() + PROMPT + waiting[0][1] < tokens:
            number, done = waiting.popleft()
            running[number] = done
        while held() + len(running) > tokens:
            waiting.appendleft(running.popitem())
        now += step + sequence * len(running)
        running = {number: done + 1 for number, done in running.items()}
        for number in [n for n, done in running.items() if done == lengths[n]]:
            del running[number]
            args = {"prompt_tokens": PROMPT, "response_tokens": lengths[number], "stop_reason": "completed"}
            spans.append(Span("request", f"replica {replica}", "generate", 1e-6 * number, now, args))
    return spans


def timeline(*spans):
    end = max((span.end for span in spans), default=1.0)
    generation = max((span.end for span in spans if span.name == "request"), default=end)
    return Timeline("run", 1, 0.0, end, (Span("gen", "step", "stage", 0.0, generation), *spans))
