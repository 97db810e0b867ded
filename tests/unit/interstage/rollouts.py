"""A step of known costs, played out decode step by decode step, as its timeline."""

from collections import deque

from verl_fuse.spec.timeline import Span, Timeline


def generated(lengths, slots, step, sequence, replica=0):
    """Request spans of one replica that is asked for one sample after the other, all at about time 0."""
    waiting, running, now, spans = deque(enumerate(lengths)), {}, 0.0, []
    while waiting or running:
        while waiting and len(running) < slots:
            number, length = waiting.popleft()
            running[number] = length
        now += step + sequence * len(running)
        for number in [n for n in running if running[n] == 1]:
            del running[number]
            args = {"prompt_tokens": 9, "response_tokens": lengths[number], "stop_reason": "completed"}
            spans.append(Span("request", f"replica {replica}", "generate", 1e-6 * number, now, args))
        running = {number: left - 1 for number, left in running.items()}
    return spans


def timeline(*spans):
    end = max((span.end for span in spans), default=1.0)
    generation = max((span.end for span in spans if span.name == "request"), default=end)
    return Timeline("run", 1, 0.0, end, (Span("gen", "step", "stage", 0.0, generation), *spans))
