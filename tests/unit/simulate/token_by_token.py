"""Continuous batching one token at a time: slow, and simple enough to be read as the rules themselves."""

from collections.abc import Callable, Sequence


def simulate(
    queue: Sequence[int],
    prompt: Sequence[int],
    length: Sequence[int],
    decode: Callable[[int, float], float],
    prefill: Callable[[int, int, float], float],
    *,
    max_batch: int,
    kv_capacity: int,
    budget: int,
    cached: dict[int, int] | None = None,
    arrival: dict[int, float] | None = None,
) -> tuple[dict[int, float], int, int]:
    """Finish time of each request, the largest batch and the most tokens held; `decode(batch, mean context)`,
    `prefill(sequences, tokens, squares)`."""
    cached, arrival = dict(cached or {}), arrival or {}
    waiting, running = list(queue), []
    done = dict.fromkeys(queue, 0)
    finish: dict[int, float] = {}
    clock, most, fullest = 0.0, 0, 0

    def held() -> int:
        return sum(prompt[i] + done[i] for i in running)

    while waiting or running:
        if not running and arrival.get(waiting[0], 0.0) > clock:
            clock = arrival[waiting[0]]
        older, older_held = len(running), held()
        prompts, tokens, squares = 0, 0, 0.0
        while waiting and len(running) < max_batch and tokens < budget and arrival.get(waiting[0], 0.0) <= clock:
            i = waiting[0]
            context = prompt[i] + done[i]
            if running and held() + context + len(running) + 1 > kv_capacity:
                break
            prompts += context > cached.get(i, 0)
            tokens += context - cached.get(i, 0)
            squares += context**2 - cached.pop(i, 0) ** 2
            running.append(waiting.pop(0))
        if len(running) > 1 and held() + len(running) > kv_capacity:
            waiting.insert(0, running.pop())
            continue
        if tokens:
            clock += prefill(prompts, tokens, squares) + (decode(older, older_held / older) if older else 0.0)
        else:
            clock += decode(len(running), held() / len(running))
        most = max(most, len(running))
        for i in list(running):
            done[i] += 1
        fullest = max(fullest, held())
        for i in [i for i in running if done[i] == length[i]]:
            finish[i] = clock
            running.remove(i)
    return finish, most, fullest
