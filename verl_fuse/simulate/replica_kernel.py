"""Simulates continuous batching on one replica, event by event: between two events every decode step has the same
batch, so steps are integrated, not counted.

Invariants (tests/unit/simulate/test_kernel.py):
- finish times equal the finish times of a token-by-token simulation of the same rules;
- stopping at any time and going on gives the same finish times as running through;
- never more than `max_batch` sequences run, nor more than `kv_capacity` tokens are held.

The rules are vLLM's V1 scheduler's, without its block granularity: first come, first served; a request is admitted at a
step boundary when it has arrived, a batch slot is free and the memory holds its context plus one step of everybody; a
step with new prompts takes their prefill plus one decode step of the others, and gives everybody a token; prompts
beyond the step's token budget wait for the next step. When the memory cannot hold another step, the sequence admitted
last is thrown out and later prefills its prompt and the tokens it had.

State, per request and by position in the queue: `done` tokens generated, `cached` tokens of its context that need no
prefill, `finish` (NaN until finished). Requests before position `head` run or are finished, the others wait.
"""

import heapq

import numpy as np
from numba import njit


@njit(cache=True, nogil=True, inline="always")
def _integral(decode, integral, spacing, batch, context):
    cell = min(max(int(context / spacing), 0), decode.shape[1] - 2)
    offset = context - cell * spacing
    slope = (decode[batch, cell + 1] - decode[batch, cell]) / spacing
    return integral[batch, cell] + offset * (decode[batch, cell] + 0.5 * slope * offset)


@njit(cache=True, nogil=True)
def decode_seconds(decode, integral, spacing, batch, context, steps):
    """Return the seconds of `steps` decode steps of `batch` sequences whose mean context is `context` before the first
    step."""
    end = _integral(decode, integral, spacing, batch, context + steps - 0.5)
    return end - _integral(decode, integral, spacing, batch, context - 0.5)


@njit(cache=True, nogil=True)
def _steps_reaching(decode, integral, spacing, batch, context, seconds, most):
    """Return the fewest steps that take at least `seconds`; `most` if fewer do not."""
    low, high = 1, most
    while low < high:
        middle = (low + high) // 2
        if decode_seconds(decode, integral, spacing, batch, context, middle) >= seconds:
            high = middle
        else:
            low = middle + 1
    return low


@njit(cache=True, nogil=True)
def prefill_seconds(sequences, tokens, squares, grid, seconds, request_seconds, square_seconds):
    """Return the seconds of prefilling `tokens` tokens of `sequences` requests; `squares` is the attention's share of
    squared tokens."""
    if tokens <= 0:
        return 0.0
    right = min(max(int(np.searchsorted(grid, tokens)), 1), len(grid) - 1)
    slope = (seconds[right] - seconds[right - 1]) / (grid[right] - grid[right - 1])
    linear = seconds[right - 1] + slope * (tokens - grid[right - 1])
    return max(linear, seconds[0]) + request_seconds * sequences + square_seconds * squares


@njit(cache=True, nogil=True)
def advance(
    queue, head, clock, until, prompt, length, done, cached, arrival, finish,
    decode, integral, spacing, grid, seconds, request_seconds, square_seconds, max_batch, kv_capacity, budget,
):  # fmt: skip
    """Run the replica from `clock` until the first step boundary at or after `until`; returns (head, clock, busy
    seconds).

    `queue` holds request numbers in order of arrival; the clock stays where the last request finished when nothing is
    left.
    """
    count = len(queue)
    last_step = np.full(count, -1, np.int64)
    events = [(0, 0) for _ in range(0)]
    batch, held, step, busy = 0, 0, 0, 0.0
    for position in range(head):
        i = queue[position]
        if np.isnan(finish[i]):
            last_step[position] = length[i] - done[i]
            heapq.heappush(events, (int(last_step[position]), int(position)))
            batch += 1
            held += prompt[i] + done[i]
    while True:
        while head < count and not np.isnan(finish[queue[head]]):
            head += 1
        if clock >= until or (batch == 0 and head == count):
            break
        if batch == 0 and arrival[queue[head]] > clock:
            clock = min(arrival[queue[head]], until)
            continue
        older, older_held = batch, held
        prompts, tokens, squares = 0, 0, 0.0
        while head < count and batch < max_batch and tokens < budget:
            i = queue[head]
            if not np.isnan(finish[i]):
                head += 1
                continue
            context = prompt[i] + done[i]
            if arrival[i] > clock or (batch > 0 and held + context + batch + 1 > kv_capacity):
                break
            prompts += context > cached[i]
            tokens += context - cached[i]
            squares += float(context) * context - float(cached[i]) * cached[i]
            cached[i] = 0
            last_step[head] = step + length[i] - done[i]
            heapq.heappush(events, (int(last_step[head]), int(head)))
            batch += 1
            held += context
            head += 1
        if batch > 1 and held + batch > kv_capacity:
            position = head - 1
            while last_step[position] < 0 or not np.isnan(finish[queue[position]]):
                position -= 1
            i = queue[position]
            done[i] = length[i] - (last_step[position] - step)
            held -= prompt[i] + done[i]
            batch -= 1
            last_step[position] = -1
            head = position
            continue
        while events[0][0] != last_step[events[0][1]]:
            heapq.heappop(events)
        if tokens > 0:
            steps = 1
            passed = prefill_seconds(prompts, tokens, squares, grid, seconds, request_seconds, square_seconds)
            if older > 0:
                passed += decode_seconds(decode, integral, spacing, older, older_held / older, 1)
        else:
            context = held / batch
            steps = events[0][0] - step
            if batch > 1:
                steps = min(steps, (kv_capacity - held) // batch)
            wait = until - clock
            if head < count and batch < max_batch and arrival[queue[head]] > clock:
                wait = min(wait, arrival[queue[head]] - clock)
            passed = decode_seconds(decode, integral, spacing, batch, context, steps)
            if passed > wait:
                steps = _steps_reaching(decode, integral, spacing, batch, context, wait, steps)
                passed = decode_seconds(decode, integral, spacing, batch, context, steps)
        clock += passed
        busy += passed
        step += steps
        held += batch * steps
        while len(events) > 0 and events[0][0] <= step:
            key, position = heapq.heappop(events)
            i = queue[position]
            if key == last_step[position] and np.isnan(finish[i]):
                finish[i] = clock
                done[i] = length[i]
                held -= prompt[i] + length[i]
                batch -= 1
    for position in range(head):
        i = queue[position]
        if np.isnan(finish[i]) and last_step[position] >= 0:
            done[i] = length[i] - (last_step[position] - step)
    return head, clock, busy


@njit(cache=True, nogil=True)
def advance_all(
    queues, offsets, heads, clocks, busy, until, prompt, length, done, cached, arrival, finish,
    decode, integral, spacing, grid, seconds, request_seconds, square_seconds, max_batch, kv_capacity, budget,
):  # fmt: skip
    """Call `advance` for every replica r with queue `queues[offsets[r]:offsets[r + 1]]`; `heads`, `clocks` and `busy`
    are updated."""
    for r in range(len(heads)):
        heads[r], clocks[r], passed = advance(
            queues[offsets[r] : offsets[r + 1]], heads[r], clocks[r], until,
            prompt, length, done, cached, arrival, finish,
            decode, integral, spacing, grid, seconds, request_seconds, square_seconds, max_batch, kv_capacity, budget,
        )  # fmt: skip
        busy[r] += passed
