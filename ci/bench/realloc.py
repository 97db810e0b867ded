"""Compare two ways to move weights between layouts: shard to shard, and gathering every parameter in full on every rank
and loading from the full parameter.

Stock verl takes the second way from training to the rollout: `DTensor.full_tensor()` of each parameter with FSDP2
(`FSDPEngine.get_per_tensor_param`), and with Megatron a broadcast over pipeline stages and an all-gather over tensor
ranks of each tensor (mbridge `Bridge.export_weights`), whose steps are repeated here without its bookkeeping; then each
rank copies its part. The transfer of tensors to another process is left out of both ways. verl has no way from train to
train; the same gathering stands for that way.

The ranks are real processes with gloo on one machine; the model is a Qwen2-0.5B with six blocks in bf16. Seconds are
medians of `REPEATS` runs in turns, of the slowest rank; peak extra bytes are the resident memory of the fullest rank
beyond both layouts' tensors, its highest mark in the first run. `bitwise`: the tensors that arrive are equal both ways.
"""

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "unit" / "runtime"))
from ranks import Ranks, World
from transfers import opened, tensors_of

from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.parameters import parameters_of
from verl_fuse.reshard.program import TransferProgram, lower_bound, plan_transfer
from verl_fuse.reshard.rectangles import Rectangle
from verl_fuse.reshard.sharding import LocalTensor, PlacedSharding
from verl_fuse.reshard.text import sharding_from
from verl_fuse.runtime.reshard.holding import HeldTensors
from verl_fuse.runtime.reshard.transfer import Transfer
from verl_fuse.spec.model_names import model_named

WEIGHTS = parameters_of(dataclasses.replace(model_named("qwen2-0.5b"), layers=6), "qwen2")
DTYPE = torch.bfloat16
BUCKET_BYTES = 64 << 20
REPEATS = 3
# Source and target layouts are listed by number of ranks.
CASES: dict[int, tuple[tuple[str, str], ...]] = {
    4: (
        ("fsdp 4", "vllm tp2 dp2"),
        ("megatron tp2 pp2", "vllm tp2 dp2"),
        ("megatron tp2 pp2", "megatron pp4"),
        ("megatron pp2 dp2", "fsdp 4"),
    ),
    8: (
        ("fsdp 8", "vllm tp2 dp4"),
        ("fsdp 2x4", "vllm tp2 dp4"),
        ("megatron tp2 pp2 dp2", "vllm tp2 dp4"),
        ("megatron tp2 pp4", "megatron tp2 pp2 dp2"),
    ),
}

# These pairs are only planned, for LLaMA-2-70B on 1024 ranks, eight a node.
PLANNED = (
    ("megatron tp8 pp8 dp16", "vllm tp8 dp128"),
    ("megatron tp8 pp8 dp16", "megatron tp4 pp4 dp64"),
    ("megatron tp8 pp8 dp16", "fsdp 1024"),
    ("fsdp 1024", "fsdp 768"),
    ("fsdp 1024", "vllm tp8 dp128"),
)


@dataclasses.dataclass
class Setup:
    """The state that one process keeps of a case."""

    program: TransferProgram
    transfer: Transfer
    source: dict[str, torch.Tensor]
    ours: dict[str, torch.Tensor]
    theirs: dict[str, torch.Tensor]
    gathered: Any


def prepare(world: World, program: TransferProgram, name: str) -> bool:
    port, watch, rank = opened(world, name, 300.0)
    whole = {p.name: torch.empty(p.rows, p.columns, dtype=DTYPE) for p in WEIGHTS.parameters}
    generator = torch.Generator().manual_seed(0)
    for parameter in WEIGHTS.parameters:
        whole[parameter.name].copy_(torch.rand(parameter.rows, parameter.columns, generator=generator))
    source = tensors_of(program.source, WEIGHTS, rank, whole, DTYPE)
    ours, theirs = (tensors_of(program.target, WEIGHTS, rank, None, DTYPE) for _ in range(2))
    sharding = program.source.sharding
    if isinstance(sharding, FsdpSharding):
        gathered: Any = FromFsdp(sharding)
    else:
        assert isinstance(sharding, MegatronSharding), "verl trains with FSDP or Megatron"
        gathered = FromMegatron(world, sharding)
    transfer = Transfer(program, rank, port, watch, dtype=DTYPE)
    world.setup = Setup(program, transfer, source, ours, theirs, gathered)  # pyright: ignore[reportAttributeAccessIssue]
    return True


class FromFsdp:
    """Gather every parameter in full, one after the other."""

    def __init__(self, sharding: FsdpSharding) -> None:
        ranks = torch.arange(sharding.devices).view(sharding.replicas, sharding.shards)
        self._mesh = DeviceMesh("cpu", ranks)

    def __call__(self, source: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, int]]:
        for parameter in WEIGHTS.parameters:
            shape = (parameter.rows, parameter.columns) if parameter.columns > 1 else (parameter.rows,)
            local = source.get(parameter.name, torch.empty((0, *shape[1:]), dtype=DTYPE))
            stride = (parameter.columns, 1) if parameter.columns > 1 else (1,)
            tensor = DTensor.from_local(
                local, self._mesh, (Replicate(), Shard(0)), run_check=False, shape=torch.Size(shape), stride=stride
            )
            full = tensor.full_tensor()
            yield parameter.name, full, full.nbytes - local.nbytes


class FromMegatron:
    """Broadcast every tensor over stages and gather every tensor over tensor ranks."""

    def __init__(self, world: World, sharding: MegatronSharding) -> None:
        self._sharding, layout = sharding, sharding.layout
        copies, self._rank = layout.dp * layout.cp, world.rank
        self._tp: Any = None
        # Every process opens every group.
        for stage in range(layout.pp):
            for copy in range(copies):
                ranks = [tp + layout.tp * (copy + copies * stage) for tp in range(layout.tp)]
                group = world.group(ranks)
                if world.rank in ranks:
                    self._tp = group
        for place in range(layout.tp * copies):
            ranks = [place + layout.tp * copies * stage for stage in range(layout.pp)]
            group = world.group(ranks)
            if world.rank in ranks:
                self._pp = group, ranks
        self._locals = [
            [sharding.tensors(WEIGHTS, layout.tp * copies * s + t) for t in range(layout.tp)] for s in range(layout.pp)
        ]

    def __call__(self, source: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, int]]:
        degree, (group, stages) = self._sharding.layout.tp, self._pp
        for stage, shards in enumerate(self._locals):
            for same in zip(*shards, strict=True):
                if stage and same[0].name == "output_layer.weight" and WEIGHTS.model.tied_embeddings:
                    continue
                mine, received = stages[stage] == self._rank, 0
                tensor = source[same[0].name] if mine else torch.empty(same[0].shape, dtype=DTYPE)
                if len(stages) > 1:
                    dist.broadcast(tensor, stages[stage], group=group)
                    received += 0 if mine else tensor.nbytes
                parts = [tensor]
                if degree > 1:
                    parts = [torch.empty_like(tensor) for _ in range(degree)]
                    dist.all_gather(parts, tensor, group=self._tp)
                    received += (degree - 1) * tensor.nbytes
                for name, full in self._merged(same, parts):
                    yield name, full, received
                    received = 0

    def _merged(self, same: tuple[LocalTensor, ...], parts: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of one fused tensor."""
        for name in dict.fromkeys(piece.parameter for local in same for piece in local.pieces):
            parameter = WEIGHTS.parameters[WEIGHTS.index[name]]
            full = torch.empty(parameter.rows, parameter.columns, dtype=DTYPE)
            for local, part in zip(same, parts, strict=True):
                for piece in (piece for piece in local.pieces if piece.parameter == name):
                    view = part.as_strided((piece.rows, piece.columns), (piece.stride, 1), piece.offset)
                    area = full[piece.row : piece.row + piece.rows, piece.column : piece.column + piece.columns]
                    # Replicated tensors come from every rank.
                    area.copy_(view)
            yield name, full


def gather_and_load(setup: Setup, rank: int) -> int:
    """Gather and load all parameters, and return the bytes that this rank received."""
    placed, received = setup.program.target, 0
    target = HeldTensors(WEIGHTS, placed.tensors(WEIGHTS, rank), f"rank {rank}", setup.theirs)
    for name, full, size in setup.gathered(setup.source):
        received += size
        index = WEIGHTS.index[name]
        parameter = WEIGHTS.parameters[index]
        matrix = full.view(parameter.rows, parameter.columns)
        for row, column, view in held_views(target, index, placed.tensors(WEIGHTS, rank), name):
            view.copy_(matrix[row : row + view.shape[0], column : column + view.shape[1]])
    return received


def held_views(
    target: HeldTensors, index: int, locals_: tuple[LocalTensor, ...], name: str
) -> Iterator[tuple[int, int, torch.Tensor]]:
    """Yield the parts of a parameter that a rank loads: (row, column, view of the target)."""
    for piece in (piece for local in locals_ for piece in local.pieces if piece.parameter == name and piece.rows):
        rectangle = Rectangle(index, piece.row, piece.rows, piece.column, piece.columns, 0)
        for row, column, view in target.views(rectangle):
            yield piece.row + row, piece.column + column, view


def measure(world: World, which: str) -> tuple[float, int, int]:
    """Return (seconds, bytes received, resident memory above the memory before)."""
    setup: Setup = world.setup  # pyright: ignore[reportAttributeAccessIssue]
    dist.barrier()
    before = high_mark(reset=True)
    begun = time.monotonic()
    if which == "verl":
        received = gather_and_load(setup, world.rank)
    else:
        received = setup.transfer.run(setup.source, setup.ours, 1).received_bytes
    seconds = time.monotonic() - begun
    return seconds, received, high_mark() - before


def high_mark(reset: bool = False) -> int:
    """Return the highest resident bytes since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) * 1024


def equal(world: World) -> bool:
    setup: Setup = world.setup  # pyright: ignore[reportAttributeAccessIssue]
    return all(torch.equal(setup.ours[name], setup.theirs[name]) for name in setup.ours)


def case(ranks: Ranks, size: int, source: str, target: str) -> dict[str, Any]:
    begun = time.monotonic()
    have, want = PlacedSharding.at(sharding_from(source)), PlacedSharding.at(sharding_from(target))
    program = plan_transfer(WEIGHTS, have, want, nodes=[0] * size, bucket_bytes=BUCKET_BYTES)
    planning = time.monotonic() - begun
    ranks.call(prepare, program, f"{size} {source} {target}")
    runs: dict[str, list] = {"fuse": [], "verl": []}
    for _ in range(REPEATS):
        for which, found in runs.items():
            found.append(ranks.call(measure, which))
    seconds = {which: statistics.median(max(each[0] for each in run) for run in found) for which, found in runs.items()}
    moved = {which: sum(each[1] for each in found[0]) for which, found in runs.items()}
    peak = {which: max(each[2] for each in found[0]) for which, found in runs.items()}
    return {
        "case": f"{source} -> {target}",
        "ranks": size,
        "bytes": moved["fuse"],
        "lower_bound_bytes": lower_bound(program)[0],
        "verl_bytes": moved["verl"],
        "seconds": round(seconds["fuse"], 3),
        "verl_seconds": round(seconds["verl"], 3),
        "planning_seconds": round(planning, 3),
        "peak_extra_bytes": peak["fuse"],
        "verl_peak_extra_bytes": peak["verl"],
        "bucket_bytes": BUCKET_BYTES,
        "bitwise": all(ranks.call(equal)),
    }


def planning() -> list[dict[str, Any]]:
    """Return the wall seconds to plan, and the processor seconds for a machine with other work; compiled code is
    compiled before."""
    weights, found = parameters_of(model_named("llama-2-70b"), "llama"), []
    for source, target in (("fsdp 2", "vllm tp2"), *PLANNED):
        begun, used = time.monotonic(), time.process_time()
        have, want = PlacedSharding.at(sharding_from(source)), PlacedSharding.at(sharding_from(target))
        program = plan_transfer(weights, have, want, nodes=[rank // 8 for rank in range(1024)])
        row: dict[str, Any] = {
            "case": f"{source} -> {target}",
            "seconds": round(time.monotonic() - begun, 2),
            "processor_seconds": round(time.process_time() - used, 2),
            "messages": len(program.hops),
        }
        bound, network_bound = lower_bound(program)
        row |= {"bytes": program.bytes, "lower_bound_bytes": bound}
        found.append(row | {"network_bytes": program.network_bytes, "network_lower_bound_bytes": network_bound})
    return found[1:]


def main() -> None:
    cases = []
    for size, pairs in CASES.items():
        for source, target in pairs:
            with Ranks(size) as ranks:
                cases.append(case(ranks, size, source, target))
                print(json.dumps(cases[-1]), flush=True)
    print(json.dumps({"bench": "realloc", "model": WEIGHTS.model.name, "cases": cases, "planning": planning()}))


if __name__ == "__main__":
    main()
