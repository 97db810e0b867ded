"""Runs one rank's row of a program, together with the other ranks.

Invariants (tests/unit/runtime/test_executor.py, test_random_programs.py):
- ops run in the row's order, and only a message that has not arrived makes a rank wait: receives are posted ahead, and
sends are waited for at the end;
- gradients are finalised only after every rank has done its last op, pipeline by pipeline in the problem's order;
- ranks that disagree about the program or its messages stop before the first op;
- losses and gradients are bitwise the same as with these stages run one pipeline and one micro-batch at a time.
"""

import hashlib
from collections.abc import Mapping

from verl_fuse.errors import FuseError
from verl_fuse.runtime.agreement import Offer, disagreement
from verl_fuse.runtime.check import check, predicted_peaks
from verl_fuse.runtime.links import Link
from verl_fuse.runtime.program import PipelineProgram
from verl_fuse.runtime.report import ProgramReport
from verl_fuse.runtime.row import RowExecution, channels, spec_of
from verl_fuse.runtime.stage import PipelineStage
from verl_fuse.runtime.watch import Watch
from verl_fuse.spec.schedule import OpKind


class Executor:
    """One rank's row of a checked program, bound to process groups; runs any number of times.

    `rank` is the rank of the problem that this process plays, `links` its places in the problem's pipelines. At most
    `depth` messages per pipeline and direction are received ahead of their ops.
    """

    def __init__(
        self, program: PipelineProgram, rank: int, links: Mapping[int, Link], watch: Watch, depth: int = 2
    ) -> None:
        check(program)
        if depth < 1:
            raise FuseError(f"depth={depth}; needs at least 1")
        self._program = program
        self._digests = program.digests
        self._rank = rank
        self._links = {index: links[index] for index, p in enumerate(program.problem.pipelines) if rank in p.ranks}
        self._watch = watch
        self._depth = depth
        for index, link in self._links.items():
            pipeline = program.problem.pipelines[index]
            there, here = (link.stage, len(link.ranks)), (pipeline.ranks.index(rank), pipeline.stages)
            if there != here:
                raise FuseError(
                    f"pipeline {index}: link of stage {there[0]} of {there[1]}; needs {here[0]} of {here[1]}"
                )

    def run(self, stages: Mapping[int, PipelineStage]) -> ProgramReport:
        """Run every op on `stages`, one per pipeline of this rank; a FuseError names rank, op and peer at
        fault, the same on every rank.

        After an error no further program can run on these links.
        """
        if set(stages) != set(self._links):
            raise FuseError(f"rank {self._rank}: stages for pipelines {sorted(stages)}; needs {sorted(self._links)}")
        with self._watch.program():
            self._agree(stages)
            for index in self._links:
                stages[index].begin()
            row = RowExecution(self._program, self._rank, self._links, stages, self._watch, self._depth)
            spans = row.run()
            self._watch.gather("completion", "")
            for index in self._links:
                self._watch.runs(f"finalising the gradients of pipeline {index}")
                stages[index].end()
        return ProgramReport(spans, row.meter.peak, predicted_peaks(self._program)[self._rank], row.meter.held)

    def _agree(self, stages: Mapping[int, PipelineStage]) -> None:
        """Compare programs and messages with all ranks."""
        me, connections = self._watch.rank, {}
        for index, kind, source, target in channels(self._links):
            if source is not None:
                connections[f"{index}{kind} {source}>{me}"] = self._messages(stages[index], index, kind, "arrives")
            if target is not None:
                connections[f"{index}{kind} {me}>{target}"] = self._messages(stages[index], index, kind, "leaves")
        offers = self._watch.gather("agreement", Offer(self._digests, connections).to_json())
        verdict = disagreement({rank: Offer.from_json(text) for rank, text in offers.items()})
        if verdict is not None:
            raise self._watch.stop(verdict)
        self._watch.forget("agreement", "completion")

    def _messages(self, stage: PipelineStage, pipeline: int, kind: OpKind, way: str) -> str:
        count = self._program.problem.pipelines[pipeline].microbatches
        specs = [str(spec_of(stage, kind, way, microbatch)) for microbatch in range(count)]
        return hashlib.sha256("\n".join(specs).encode()).hexdigest()
