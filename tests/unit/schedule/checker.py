"""An independent judge of schedules: written from the problem statement alone, sharing no code with the solver."""

from collections import defaultdict
from itertools import pairwise

from verl_fuse.spec.schedule import Schedule

EPS = 1e-6


def faults(schedule: Schedule) -> list[str]:
    """Everything wrong with a schedule; empty when it is right."""
    problem, found = schedule.problem, []
    at = {}
    for op in schedule.ops:
        key = (op.pipeline, op.rank, op.kind, op.microbatch)
        if key in at:
            found.append(f"twice: {op}")
        at[key] = op
        if op.start < -EPS:
            found.append(f"before time zero: {op}")

    expected = set()
    for number, pipe in enumerate(problem.pipelines):
        for stage, rank in enumerate(pipe.ranks):
            for mb in range(pipe.microbatches):
                for kind, cost in (("F", pipe.forward[stage]), ("B", pipe.backward[stage])):
                    key = (number, rank, kind, mb)
                    expected.add(key)
                    if key not in at:
                        found.append(f"missing: {key}")
                    elif abs(at[key].end - at[key].start - cost) > EPS:
                        found.append(f"duration is not {cost}: {at[key]}")
    found += [f"not in the problem: {key}" for key in set(at) - expected]
    if found:
        return found

    for number, pipe in enumerate(problem.pipelines):
        for mb in range(pipe.microbatches):
            path = [at[number, rank, "F", mb] for rank in pipe.ranks] + [
                at[number, rank, "B", mb] for rank in reversed(pipe.ranks)
            ]
            for first, then in pairwise(path):
                wait = problem.transfer if first.rank != then.rank else 0.0
                if then.start < first.end + wait - EPS:
                    found.append(f"{then} starts before {first} has arrived")
        for rank in pipe.ranks:
            for kind in "FB":
                line = [at[number, rank, kind, mb] for mb in range(pipe.microbatches)]
                for first, then in pairwise(line):
                    if then.start < first.end - EPS:
                        found.append(f"not first in, first out: {then} after {first}")

    by_rank = defaultdict(list)
    for op in schedule.ops:
        by_rank[op.rank].append(op)
    worst = 0.0
    for rank, ops in by_rank.items():
        ops.sort(key=lambda op: op.start)
        for first, then in pairwise(ops):
            if then.start < first.end - EPS:
                found.append(f"overlap on rank {rank}: {first} and {then}")
        for moment in [op.start for op in ops if op.kind == "F"]:
            held = 0.0
            for number, pipe in enumerate(problem.pipelines):
                if rank in pipe.ranks:
                    size = pipe.activation[pipe.ranks.index(rank)]
                    for mb in range(pipe.microbatches):
                        forward, backward = at[number, rank, "F", mb], at[number, rank, "B", mb]
                        # An op that ends exactly at `moment` has released its activation.
                        held += size if forward.start <= moment + EPS and backward.end > moment + EPS else 0.0
            worst = max(worst, held)
    if abs(worst - schedule.peak_memory) > EPS:
        found.append(f"peak memory is {worst}, reported {schedule.peak_memory}")
    if problem.memory_limit is not None and worst > problem.memory_limit + EPS:
        found.append(f"peak memory {worst} over the limit {problem.memory_limit}")
    end = max(op.end for op in schedule.ops)
    if abs(end - schedule.makespan) > EPS:
        found.append(f"ends at {end}, reported {schedule.makespan}")
    if schedule.lower_bound > end + EPS or schedule.memory_lower_bound > worst + EPS:
        found.append("a lower bound is above the value reached")
    if schedule.optimal != (end <= schedule.lower_bound + EPS):
        found.append("optimal flag does not say whether makespan meets its bound")
    if schedule.memory_optimal != (worst <= schedule.memory_lower_bound + EPS):
        found.append("memory_optimal flag does not say whether peak memory meets its bound")
    return found
