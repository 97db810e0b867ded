"""Chooses the schedules of the next update of actor and critic, from measurements of the updates before it.

Problems are solved in a thread of their own while other stages run; until one is solved, its calls run one model after
the other, which is also what measures them first.

Invariants (tests/unit/host/test_update_schedules.py):
- a problem is made of medians over the last `REMEMBERED` updates and the processes of a rank, rounded to two digits:
  noise makes no new one;
- a schedule stays until a cost has moved by more than `DRIFT`, and is then used until the new one is there;
- where no schedule is predicted to be faster, there is none, and that is said once per problem.
"""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

from verl_fuse.errors import FuseError
from verl_fuse.spec.problem import Pipeline, ScheduleProblem
from verl_fuse.spec.schedule import Schedule
from verl_fuse_pipeline.report import MODELS, Counts, RankReport

logger = logging.getLogger(__name__)

REMEMBERED = 3
DRIFT = 0.10
# Share of what the device has left that activations may take: allocators fragment.
HEADROOM = 0.9

Solve = Callable[[ScheduleProblem], Schedule | None]


class UpdateSchedules:
    """`solve` returns a schedule that is predicted to be faster than one model after the other, or None."""

    def __init__(self, solve: Solve) -> None:
        self._solve = solve
        self._reports: deque[Sequence[RankReport]] = deque(maxlen=REMEMBERED)
        # Measured while a model runs alone, which it may do only once.
        self._activations: dict[tuple[str, int], float] = {}
        self._problems: dict[Counts, ScheduleProblem] = {}
        self._schedules: dict[Counts, Schedule] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.solved = 0

    def ready(self) -> dict[Counts, Schedule]:
        """Return schedules by micro-batches of actor and critic; raise the error that a solver raised."""
        if self._failure is not None:
            raise FuseError(f"the schedule of the fused update could not be solved: {self._failure}") from self._failure
        return dict(self._schedules)

    def learn(self, reports: Sequence[RankReport]) -> None:
        """Take in an update, one report per process; start to solve counts that are new or have drifted."""
        self._reports.append(reports)
        for report in reports:
            for model, cost in report.costs.items():
                known = self._activations.get((model, report.rank), 0.0)
                if cost.activation is not None:
                    self._activations[model, report.rank] = max(known, cost.activation)
        if self._thread is not None and self._thread.is_alive():
            return
        wanted = {
            counts: found
            for counts in sorted({counts for report in reports for counts in report.counts if min(counts) > 0})
            if drifted(found := problem(counts, self._reports, self._activations), self._problems.get(counts))
        }
        if wanted:
            self._thread = threading.Thread(target=self._run, args=(wanted,), name="verl-fuse schedules", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        """Wait until the solving under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def _run(self, wanted: Mapping[Counts, ScheduleProblem]) -> None:
        try:
            for counts, found in wanted.items():
                schedule = self._solve(found)
                self._problems[counts] = found
                self.solved += 1
                if schedule is None:
                    self._schedules.pop(counts, None)
                    logger.warning(
                        "%d actor and %d critic micro-batches run one model after the other: no fused "
                        "schedule is predicted to be faster",
                        *counts,
                    )
                else:
                    self._schedules[counts] = schedule
        except Exception as error:  # noqa: BLE001  raised by `ready`, in the trainer's thread
            self._failure = error


def problem(
    counts: Counts, updates: Iterable[Sequence[RankReport]], activations: Mapping[tuple[str, int], float]
) -> ScheduleProblem:
    """Return the scheduling problem of one call of each model: seconds, and bytes of a micro-batch by model and rank
    where every one is known."""
    reports = [report for update in updates for report in update]
    latest = reports[-1]
    costs = {
        (model, rank): [r.costs[model] for r in reports if r.rank == rank and model in r.costs]
        for model, placements in latest.placements.items()
        for ranks in placements
        for rank in ranks
    }
    known = costs.keys() <= activations.keys()
    headrooms = [report.headroom for report in reports]
    least = [headroom for headroom in headrooms if headroom is not None]
    pipelines = [
        Pipeline(
            model,
            ranks,
            count,
            [_typical(c.forward for c in costs[model, rank]) for rank in ranks],
            [_typical(c.backward for c in costs[model, rank]) for rank in ranks],
            [_rounded(activations[model, rank]) if known else 1.0 for rank in ranks],
        )
        for model, count in zip(MODELS, counts, strict=True)
        for ranks in latest.placements[model]
    ]
    # One micro-batch at a time has run already.
    limit = max(HEADROOM * min(least), *activations.values()) if known and len(least) == len(headrooms) else None
    return ScheduleProblem(
        1 + max(max(p.ranks) for p in pipelines), tuple(pipelines), None if limit is None else _rounded(limit)
    )


def drifted(new: ScheduleProblem, old: ScheduleProblem | None) -> bool:
    """Tell whether some cost has moved by more than `DRIFT`, or the problem is another one."""
    if old is None or [p.ranks for p in new.pipelines] != [p.ranks for p in old.pipelines]:
        return True
    return any(
        abs(a - b) > DRIFT * b
        for one, other in zip(new.pipelines, old.pipelines, strict=True)
        for a, b in zip((*one.forward, *one.backward), (*other.forward, *other.backward), strict=True)
    )


def _typical(values: Iterable[float]) -> float:
    return _rounded(statistics.median(values))


def _rounded(value: float) -> float:
    return float(f"{value:.2g}")
