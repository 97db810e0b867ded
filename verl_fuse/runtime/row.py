"""Runs one rank's row of instructions once over its stages and channels."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping

import torch

from verl_fuse.errors import FuseError
from verl_fuse.runtime.clock import clock_for
from verl_fuse.runtime.links import Link
from verl_fuse.runtime.lower import neighbours
from verl_fuse.runtime.meter import ActivationMeter
from verl_fuse.runtime.program import Instruction, PipelineProgram
from verl_fuse.runtime.stage import PipelineStage, TensorSpec
from verl_fuse.runtime.transport import Inbox, Outbox
from verl_fuse.runtime.watch import Watch
from verl_fuse.spec.schedule import OpKind
from verl_fuse.spec.timeline import Span


class RowExecution:
    """Channels, clock and meter of one run; receives are posted as soon as the object is made."""

    def __init__(
        self,
        program: PipelineProgram,
        rank: int,
        links: Mapping[int, Link],
        stages: Mapping[int, PipelineStage],
        watch: Watch,
        depth: int,
    ) -> None:
        self.meter = ActivationMeter(weight for stage in stages.values() for weight in stage.weights())
        self._program = program
        self._steps = program.rows[rank]
        self._stages = stages
        self._watch = watch
        devices = {stage.device for stage in stages.values()} or {torch.device("cpu")}
        if len(devices) > 1:
            raise FuseError(f"stages on devices {', '.join(sorted(map(str, devices)))}; a rank has one")
        self._device = devices.pop()
        self._clock = clock_for(self._device)
        self._left = Counter(step.pipeline for step in self._steps if (step.action, step.kind) == ("run", "B"))
        self._marks: list[tuple[Instruction, int, int, float]] = []
        self._inboxes: dict[tuple[int, OpKind], Inbox] = {}
        self._outboxes: dict[tuple[int, OpKind], Outbox] = {}
        for index, kind, source, target in channels(links):
            if source is not None:
                specs = [spec_of(stages[index], kind, "arrives", m) for m in range(self._microbatches(index))]
                self._inboxes[index, kind] = Inbox(links[index].ports[kind], source, specs, depth, self._device)
            if target is not None:
                self._outboxes[index, kind] = Outbox(links[index].ports[kind], target)

    def run(self) -> tuple[Span, ...]:
        """Run every instruction in order, then the sends that have not left; return a span per op."""
        message: torch.Tensor | None = None  # The message between neighbours in the row.
        waited = 0.0
        for step in self._steps:
            self._push()
            if step.action == "receive":
                begun = time.monotonic()
                message = self._receive(step)
                waited = time.monotonic() - begun
            elif step.action == "run":
                message = self._op(step, message, waited)
                waited = 0.0
            else:
                assert message is not None, "an op that is followed by a send makes a message"
                self._outboxes[step.pipeline, step.kind].put(message)
                message = None
        for (index, kind), outbox in self._outboxes.items():
            what, peers = f"the last messages {index}{kind} to leave", [outbox.target]
            self._watch.wait(what, peers, lambda seconds, outbox=outbox: outbox.flush(seconds, self._push) or None)
        return self._spans()

    def _receive(self, step: Instruction) -> torch.Tensor:
        inbox = self._inboxes[step.pipeline, step.kind]
        return self._watch.wait(step.op, [inbox.source], lambda seconds: inbox.take(seconds, self._push))

    def _push(self) -> None:
        for outbox in self._outboxes.values():
            outbox.push()

    def _op(self, step: Instruction, message: torch.Tensor | None, waited: float) -> torch.Tensor | None:
        stage = self._stages[step.pipeline]
        self._watch.runs(step.op)
        begin = self._clock.mark()
        if step.kind == "F":
            with self.meter.forward():
                made = stage.forward(step.microbatch, message)
        else:
            self._left[step.pipeline] -= 1
            if self._left[step.pipeline] == 0:
                stage.before_last_backward()
            made = stage.backward(step.microbatch, message)
        self._marks.append((step, begin, self._clock.mark(), waited))
        return self._checked(step, made)

    def _checked(self, step: Instruction, made: torch.Tensor | None) -> torch.Tensor | None:
        """Return the message in the form its receiver expects; there a wrong shape would go unnoticed, or hang."""
        sends = (step.pipeline, step.kind) in self._outboxes
        wanted = spec_of(self._stages[step.pipeline], step.kind, "leaves", step.microbatch) if sends else None
        given = None if made is None else TensorSpec(tuple(made.shape), made.dtype)
        if given != wanted:
            raise FuseError(f"{step.op} made {given}; needs {wanted}")
        return None if made is None else made.contiguous()

    def _microbatches(self, pipeline: int) -> int:
        return self._program.problem.pipelines[pipeline].microbatches

    def _spans(self) -> tuple[Span, ...]:
        times = self._clock.read()
        pipelines, track = self._program.problem.pipelines, f"rank {self._watch.rank}"
        return tuple(
            Span(
                f"{pipelines[step.pipeline].model} {step.kind}{step.microbatch}",
                track,
                "train",
                times[begin],
                times[end],
                {"op": step.op, "waited": waited},
            )
            for step, begin, end, waited in self._marks
        )


def channels(links: Mapping[int, Link]) -> Iterator[tuple[int, OpKind, int | None, int | None]]:
    """Yield pipeline and kind of a rank's ops, and the global ranks that their messages come from and go to."""
    kinds: tuple[OpKind, OpKind] = ("F", "B")
    for index, link in links.items():
        for kind in kinds:
            yield index, kind, *neighbours(link.ranks, link.stage, kind)


def spec_of(stage: PipelineStage, kind: OpKind, way: str, microbatch: int) -> TensorSpec:
    """Return the spec of the message that "arrives" for an op or "leaves" it: a backward's messages are gradients of
    the messages that its forward sent and received."""
    return stage.message(microbatch) if (kind == "F") == (way == "arrives") else stage.result(microbatch)
