"""Every schedule of a tiny problem, by exhaustive dispatch. Shares no code with the solver."""

from functools import cache

from verl_fuse.spec.problem import ScheduleProblem


def pareto(problem: ScheduleProblem) -> list[tuple[float, float]]:
    """All non-dominated (makespan, peak memory) pairs, fastest first."""
    lanes = [(number, stage) for number, pipe in enumerate(problem.pipelines) for stage in range(pipe.stages)]
    index = {lane: i for i, lane in enumerate(lanes)}
    limit = float("inf") if problem.memory_limit is None else problem.memory_limit + 1e-9

    @cache
    def best(ends: tuple, free: tuple, held: tuple, since: float) -> tuple:
        """`ends[i]` holds the end times of lane i's forwards and backwards so far; ops are
        dispatched in order of start."""
        found = []
        for lane, (number, stage) in enumerate(lanes):
            pipe = problem.pipelines[number]
            rank = pipe.ranks[stage]
            for kind in (0, 1):
                done = len(ends[lane][kind])
                if done == pipe.microbatches:
                    continue
                arrival = 0.0
                if kind == 0 and stage > 0:
                    source = ends[index[number, stage - 1]][0]
                    arrival = source[done] + problem.transfer if done < len(source) else None
                elif kind == 1 and stage + 1 < pipe.stages:
                    source = ends[index[number, stage + 1]][1]
                    arrival = source[done] + problem.transfer if done < len(source) else None
                elif kind == 1:
                    source = ends[lane][0]
                    arrival = source[done] if done < len(source) else None
                if arrival is None or (kind == 1 and done >= len(ends[lane][0])):
                    continue
                start = max(arrival, free[rank])
                memory = held[rank] + pipe.activation[stage] * (1 if kind == 0 else 0)
                if start < since or memory > limit:
                    continue
                end = start + (pipe.backward if kind else pipe.forward)[stage]
                new = list(ends)
                new[lane] = (
                    (ends[lane][0] + (end,), ends[lane][1]) if kind == 0 else (ends[lane][0], ends[lane][1] + (end,))
                )
                after = memory if kind == 0 else memory - pipe.activation[stage]
                rest = best(tuple(new), _with(free, rank, end), _with(held, rank, round(after, 9)), start)
                found += [(max(end, makespan), max(memory, peak)) for makespan, peak in rest]
        if not found and all(
            len(e[1]) == problem.pipelines[n].microbatches for e, (n, _) in zip(ends, lanes, strict=True)
        ):
            return ((0.0, 0.0),)
        kept: list[tuple[float, float]] = []
        for pair in sorted(set(found)):
            if not kept or pair[1] < kept[-1][1]:
                kept.append(pair)
        return tuple(kept)

    nothing = (0.0,) * problem.ranks
    return list(best((((), ()),) * len(lanes), nothing, nothing, 0.0))


def _with(values: tuple, at: int, value: float) -> tuple:
    return (*values[:at], value, *values[at + 1 :])
