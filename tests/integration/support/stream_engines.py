"""An actor in verl's own TrainingWorker and in the streamed one, on FSDP2, gloo processes, fixed batches: several steps
of each, side by side.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import lean_engines
import pytest
import sharded_engines
from lean_engines import GROUP, SAMPLES, Arm, Bench, batch
from ranks import World

from verl_fuse.errors import FuseError

GROUPS = SAMPLES // GROUP
# Seconds after which a rank that is busy until others have streamed gives up: they wait for it.
PATIENCE = 60.0


@dataclass(frozen=True)
class Plan:
    """How a step is streamed: groups of samples in calls of the last shard group alone, and of the first one where
    `both`; the groups that are left for the last call go to the shard groups in turn, or to the first where
    `first_alone`. `busy`: ranks that do not stream do something else until the others have. `fault` is planted."""

    early: tuple[tuple[int, ...], ...] = ((0,), (1,))
    both: bool = False
    first_alone: bool = False
    fault: str = ""
    busy: bool = False
    nominal: float = 100.0
    # How calls split rows into micro-batches, in turn.
    splits: tuple[dict[str, Any], ...] = field(default=({"micro_batch": 2}, {"tokens": 40}, {"micro_batch": 1}))


class StreamBench(Bench):
    """Both workers of a layout, kept for all arms."""

    def __init__(self, world: World, folder: Path, fsdp_size: int, **more: Any) -> None:
        from verl_fuse_update.stream.worker import StreamTrainingWorker

        build = partial(sharded_engines.worker, world, folder, "actor", fsdp_size, **more)
        self.keep("fsdp2", build, StreamTrainingWorker)
        self.streamed = folder / f"streamed by {world.size}"
        self.world, self.shard = world, fsdp_size if fsdp_size > 0 else world.size


def streamed(bench: StreamBench, arm: Arm, plan: Plan, zeros: Sequence[str], restore: bool = True) -> dict[str, Any]:
    """Train the steps in calls of shard groups; what `lean_engines.run` finds."""
    worker = bench.worker(replace(arm, lean={}))
    if restore:
        bench.restore(worker)
    lean_engines._set_loss(bench, worker, arm)
    steps = []
    for step, kind in enumerate(zeros):
        data = batch(step, kind, arm.padding)
        if arm.own:
            data.pop("old_log_probs")
        _early(bench, arm, plan, data, step)
        steps.append(_last(bench, arm, plan, data, step))
    return {"steps": steps, "held": _held(worker)}


def _held(worker: Any) -> dict[str, Any]:
    held = dict(lean_engines._parameters(worker))
    for place, state in enumerate(lean_engines._adam(worker).state.values()):
        held |= {f"{place} {key}": getattr(value, "_local_tensor", value) for key, value in state.items()}
    return {name: tensor.detach().clone() for name, tensor in held.items()}


def _order(arm: Arm, plan: Plan, step: int, **more: Any) -> Any:
    from verl_fuse_update.stream.options import StreamOrder

    deferred = arm.agg == "token-mean" and arm.loss != "sapo"
    return StreamOrder(step, plan.nominal, deferred, **more)


def _rows(bench: StreamBench, groups: Sequence[int]) -> list[int]:
    """Of the rows of these groups those of this rank."""
    rows = [GROUP * group + place for group in groups for place in range(GROUP)]
    return rows[bench.world.rank % bench.shard :: bench.shard]


def _call(bench: StreamBench, arm: Arm, plan: Plan, data: Any, rows: list[int], order: Any, number: int) -> Any:
    from verl.utils import tensordict_utils as tu

    from verl_fuse_update.lean.options import LEAN, LeanOptions
    from verl_fuse_update.stream.options import ORDER

    part = tu.index_select_tensor_dict(data, rows or [0])
    split = plan.splits[number % len(plan.splits)]
    tu.assign_non_tensor(
        part,
        **{LEAN: LeanOptions(**arm.lean or {}), ORDER: replace(order, counts=bool(rows))},
        global_batch_size=SAMPLES,
        use_dynamic_bsz="tokens" in split,
        max_token_len_per_gpu=split.get("tokens"),
        use_remove_padding=arm.packed,
        micro_batch_size_per_gpu=split.get("micro_batch"),
    )
    return bench.worker(replace(arm, lean={})).stream_rows(part)


def _early(bench: StreamBench, arm: Arm, plan: Plan, data: Any, step: int) -> None:
    number, last = bench.world.rank // bench.shard, bench.world.size // bench.shard - 1
    calls = {last: plan.early}
    if plan.both and last:
        calls = {last: plan.early[::2], 0: plan.early[1::2]}
    if number not in calls and plan.busy:
        _wait_for(bench.streamed)
    for place, groups in enumerate(calls.get(number, ())):
        rows = _rows(bench, groups)
        if plan.fault == "row dropped" and place == 0:
            rows = rows[1:]
        if plan.fault == "row twice" and place == 0:
            rows = [*rows, rows[0]]
        _call(bench, arm, plan, data, rows, _order(arm, plan, step), place)

    if number in calls and plan.busy:
        bench.streamed.touch()


def _wait_for(file: Path) -> None:
    until = time.monotonic() + PATIENCE
    while not file.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{file}: ranks that stream wait for those that are busy")
        time.sleep(0.01)


def _last(bench: StreamBench, arm: Arm, plan: Plan, data: Any, step: int) -> dict[str, Any]:
    number, groups = bench.world.rank // bench.shard, bench.world.size // bench.shard
    left = [group for group in range(GROUPS) if group not in {one for call in plan.early for one in call}]
    mine = left[number::groups] if not plan.first_alone else left if number == 0 else []
    order = _order(arm, plan, step, last=True)
    _call(bench, arm, plan, data, _rows(bench, mine), order, number)
    with pytest.MonkeyPatch.context() as patch:
        if plan.fault == "not scaled":
            patch.setattr("verl_fuse_update.stream.worker._scale", lambda module, scale: None)
        found = bench.worker(replace(arm, lean={})).stream_finish(order)
    return {key: value for key, value in found.items() if not key.startswith("perf/") and key != "tokens"}


# FSDP2, computed in bfloat16, and with activations that are kept.
_FORMS: dict[str, dict[str, Any]] = {
    "": {},
    "bf16": {"param_dtype": "bf16"},
    "kept": {"gradient_checkpointing": False},
}
_benches: dict[tuple[int, int, str], StreamBench] = {}


def _bench(world: World, folder: Path, fsdp_size: int, form: str = "") -> StreamBench:
    kind = (world.size, fsdp_size, form)
    if kind not in _benches:
        _benches[kind] = StreamBench(world, folder, fsdp_size, **_FORMS[form])
    return _benches[kind]


def compared(
    world: World,
    folder: Path,
    fsdp_size: int,
    stock: dict[str, Arm],
    ours: dict[str, tuple[Arm, Plan]],
    zeros: Any,
    form: str = "",
) -> dict[str, dict[str, float]]:
    """How streamed arms, and verl's own with another split, differ from that named "stock", by name."""
    import torch

    bench, ran = _bench(world, folder, fsdp_size, form), {}
    for name, arm in stock.items():
        torch.manual_seed(0)
        ran[name] = lean_engines.run(bench, arm, zeros)
    for name, (arm, plan) in ours.items():
        torch.manual_seed(0)
        ran[name] = streamed(bench, arm, plan, zeros)
    return {name: lean_engines.difference(ran["stock"], found) for name, found in ran.items() if name != "stock"}


def dropped(world: World, folder: Path, fsdp_size: int, stock: Arm, arm: Arm, fault: str) -> dict[str, Any]:
    """A step that is streamed in part, has `fault`, and is dropped; then verl's update of the same step, and a streamed
    step: whether both are what they are without it, and bytes of gradients that were left."""
    import torch

    bench, plan = _bench(world, folder, fsdp_size), Plan()
    worker = bench.worker(replace(arm, lean={}))
    alone = lean_engines.run(bench, replace(stock, lean={}), ("some",))
    after = streamed(bench, arm, plan, ("some",))
    bench.restore(worker)
    lean_engines._set_loss(bench, worker, arm)
    data = batch(0, "some", arm.padding)
    data.pop("old_log_probs")
    said = ""
    with _failing(worker, fault == "micro-batch" and world.rank >= world.size - bench.shard):
        try:
            _early(bench, arm, plan, data, 0)
        except MemoryError as error:
            said = str(error)
    if fault != "kept":
        worker.stream_drop()
    left = held_bytes(worker.engine.module)
    if fault == "kept":
        if worker._totals is not None:
            with pytest.raises(FuseError) as refused:
                worker.train_mini_batch(data)
            said = str(refused.value)
        worker.stream_drop()
        return {"said": said, "left": left}
    again = lean_engines.run(bench, replace(stock, lean={}), ("some",))
    next_step = streamed(bench, arm, plan, ("some",))
    pairs = ((alone, again), (after, next_step))
    same = [all(torch.equal(t, b["held"][name]) for name, t in a["held"].items()) for a, b in pairs]
    return {"said": said, "left": left, "stock": same[0], "streamed": same[1]}


@contextmanager
def _failing(worker: Any, planted: bool) -> Iterator[None]:
    """The second micro-batch of a shard group fails, as one without memory does: of one rank alone, the others of its
    group would wait for it, as in an update of verl's."""
    stock, calls = worker.loss_fn, []

    def failing(**batch: Any) -> Any:
        calls.append(1)
        if planted and len(calls) == 2:
            raise MemoryError("planted")
        return stock(**batch)

    worker.loss_fn = failing
    yield
    worker.loss_fn = stock


def held_bytes(module: Any) -> float:
    """Bytes of gradients, wherever FSDP2 keeps them, per parameter of this rank's shard."""
    from torch.distributed.fsdp import FSDPModule

    held = 0
    for part in (part for part in module.modules() if isinstance(part, FSDPModule)):
        for group in part._get_fsdp_state()._fsdp_param_groups:
            if group._partial_reduce_output is not None:
                held += group._partial_reduce_output.nbytes
            for one in group.fsdp_params:
                if one.unsharded_accumulated_grad is not None:
                    held += one.unsharded_accumulated_grad.nbytes
                if one.sharded_param.grad is not None:
                    held += one.sharded_param.grad._local_tensor.nbytes
    return held / sum(parameter._local_tensor.numel() for parameter in module.parameters())


def held_between(world: World, folder: Path, fsdp_size: int, arm: Arm) -> tuple[float, bool]:
    """Bytes of gradients per parameter of the shard between two calls, and whether log-probs of calls are those of
    verl's pass."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    bench, plan = _bench(world, folder, fsdp_size), Plan(early=((0, 1),))
    worker = bench.worker(replace(arm, lean={}))
    bench.restore(worker)
    lean_engines._set_loss(bench, worker, arm)
    data = batch(0, "some", arm.padding)
    rows = _rows(bench, (0, 1))
    found = _call(bench, arm, plan, data, rows, _order(arm, plan, 0), 0)
    held = held_bytes(worker.engine.module)
    worker.stream_drop()
    part = tu.index_select_tensor_dict(data, rows)
    tu.assign_non_tensor(
        part, compute_loss=False, calculate_entropy=True, micro_batch_size_per_gpu=2, use_dynamic_bsz=False
    )
    output = worker.infer_batch(part)
    passed = response_from_nested(output["log_probs"], data_mask := part["response_mask"])
    same = torch.allclose(found["old_log_probs"].values(), passed.values(), rtol=0, atol=1e-5)
    return held, bool(same and len(found) == len(data_mask.unbind()))
