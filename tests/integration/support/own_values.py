"""A critic in verl's own TrainingWorker, in the one whose update computes its values, and with prompts computed once,
on FSDP or Megatron, gloo processes, fixed batches: several steps of each, side by side.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import os
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lean_engines
import pytest
import sharded_engines
import small_engines
from ranks import World

STEPS = 3
PENALTY, COEFFICIENT = "low_var_kl", 0.3


@dataclass(frozen=True)
class Arm:
    """How steps are trained: by verl's pass for values and its update, or by the update alone (`own`), each prompt
    computed for each sample or once (`share`); `fault` is planted. `prompts`: groups of four samples have the same
    one."""

    own: bool = False
    share: bool = False
    prompts: bool = False
    micro_batch: int = 2
    tokens: int | None = None
    gamma: float = 0.97
    lam: float = 0.9
    with_kl: bool = True
    mini_batches: int = 1
    epochs: int = 1
    fault: str = ""


def batch(step: int, same_prompts: bool) -> Any:
    """All samples of a step, with what returns are made of; every third response has tokens of a tool, and in the last
    but one no token counts."""
    import torch

    data = small_engines.batch(step, critic=True).exclude("values", "returns")
    if same_prompts:
        prompts, answers = data["prompts"].unbind(), data["responses"].unbind()
        prompts = [prompts[place - place % 4] for place in range(len(prompts))]
        rows = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
        for name, tensors in (("prompts", prompts), ("input_ids", rows)):
            data[name] = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    draw = torch.Generator().manual_seed(200 + step)
    masks, whole = [], []
    for row, (prompt, response) in enumerate(zip(data["prompts"].unbind(), data["responses"].unbind(), strict=True)):
        # As in verl: values of bfloat16 times such a mask are of bfloat16.
        mask = torch.ones(len(response), dtype=torch.int64)
        if row % 3 == 0:
            mask[1:2] = 0
        if row == small_engines.SAMPLES - 2:
            mask[:] = 0
        masks.append(mask)
        whole.append(torch.cat([torch.zeros(len(prompt)), mask]))

    def nested(rows: Any) -> Any:
        return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)

    def noise(scale: float) -> Any:
        return nested(scale * torch.randn(len(mask), generator=draw) for mask in masks)

    data["response_mask"], data["loss_mask"] = nested(masks), nested(whole)
    lengths = data["input_ids"].offsets().diff().tolist()
    data["position_ids"] = nested(torch.arange(length) for length in lengths)
    data["rm_scores"], data["old_log_probs"], data["ref_log_prob"] = noise(1.0), noise(0.3), noise(0.3)
    return data


def with_values(worker: Any, data: Any) -> None:
    """Run verl's pass for values."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    rows = data.clone(recurse=False)
    tu.assign_non_tensor(rows, compute_loss=False)
    output = worker.infer_batch(rows)
    # Values are read on the last stage alone.
    data["values"] = (
        response_from_nested(output["values"], data["response_mask"])
        if output is not None
        else data["rm_scores"].detach().clone()
    )


def with_returns(data: Any, arm: Arm) -> None:
    """Do what verl's driver does between its pass for values and the critic's update."""
    import types

    from verl.protocol import DataProto
    from verl.trainer.ppo.core_algos import FixedKLController, compute_gae_advantage_return
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty
    from verl.workers.utils.padding import response_to_nested

    fields = ("rm_scores", "response_mask", "old_log_probs", "ref_log_prob", "values")
    padded = DataProto(batch=data.select(*fields).to_padded_tensor())
    padded.batch["token_level_rewards"] = padded.batch["token_level_scores"] = padded.batch["rm_scores"]
    if arm.with_kl:
        padded, _ = apply_kl_penalty(padded, FixedKLController(COEFFICIENT), PENALTY)
    found = types.SimpleNamespace(**padded.batch)
    _, returns = compute_gae_advantage_return(
        found.token_level_rewards, found.values, found.response_mask, arm.gamma, arm.lam
    )
    data["returns"] = response_to_nested(returns, data["response_mask"])


class Bench:
    """The workers of an engine, by what they do (`own`, `share`), kept for all arms."""

    def __init__(self, world: World, folder: Path, engine: str) -> None:
        from verl.workers.engine_workers import TrainingWorker

        from verl_fuse_update.critic.worker import own_values_worker_class

        with open(os.devnull, "w") as silence, redirect_stdout(silence):
            if engine.startswith("fsdp"):
                strategy, *precision = engine.split()
                build = partial(
                    sharded_engines.worker,
                    world,
                    folder,
                    "critic",
                    param_dtype=precision[0] if precision else "fp32",
                    strategy=strategy,
                )
            else:
                sizes = small_engines.Model(pp=int(engine.removeprefix("megatron pp")))
                case = small_engines.Case(actor=sizes, critic=sizes, distributed_optimizer=True)
                build = partial(small_engines.worker, world, folder / "critic", case, "critic")
            self.workers = {(False, False): build(), (True, False): build(kind=own_values_worker_class(TrainingWorker))}
            self._build = build
        self.engine = engine
        first = self.workers[False, False]
        self.first = {name: tensor.detach().clone() for name, tensor in lean_engines._parameters(first).items()}

    def sharing(self, own: bool) -> Any:
        """Return a worker that computes prompts once."""
        from verl.workers.engine_workers import TrainingWorker

        from verl_fuse.host.sharing.engine import share_prompts
        from verl_fuse_update.critic.worker import own_values_worker_class

        if (own, True) not in self.workers:
            kind = {"kind": own_values_worker_class(TrainingWorker)} if own else {}
            with open(os.devnull, "w") as silence, redirect_stdout(silence):
                worker = self.workers[own, True] = self._build(**kind)
            share_prompts(worker.engine, strict=True)
        return self.workers[own, True]

    restore = lean_engines.Bench.restore


def run(bench: Bench, arm: Arm) -> dict[str, Any]:
    """Train all steps; of each step verl's metrics and the values, then what every rank holds."""
    from verl.utils import tensordict_utils as tu

    from verl_fuse_update.critic import returns
    from verl_fuse_update.critic import worker as module
    from verl_fuse_update.critic.worker import OWN_VALUES

    worker = bench.sharing(arm.own) if arm.share else bench.workers[arm.own, False]
    bench.restore(worker)
    size, rank = worker.engine.get_data_parallel_size(), worker.engine.get_data_parallel_rank()
    kl = {"penalty": PENALTY, "coefficient": COEFFICIENT} if arm.with_kl else {}
    rewards = returns.Rewards(arm.gamma, arm.lam, **kl)
    steps, values = [], []
    for step in range(STEPS):
        data = batch(step, arm.prompts)
        data = tu.chunk_tensordict(data, size)[rank] if size > 1 else data
        tu.assign_non_tensor(
            data,
            **({OWN_VALUES: rewards} if arm.own else {}),
            mini_batch_size=small_engines.SAMPLES // arm.mini_batches,
            global_batch_size=small_engines.SAMPLES // arm.mini_batches,
            epochs=arm.epochs,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            use_dynamic_bsz=arm.tokens is not None,
            max_token_len_per_gpu=arm.tokens,
            micro_batch_size_per_gpu=arm.micro_batch,
        )
        first = data.shape[0] // arm.mini_batches
        if not arm.own or arm.mini_batches > 1:
            with_values(worker, data)
        if not arm.own:
            with_returns(data, arm)
        elif arm.mini_batches > 1:
            for row in data["values"].unbind()[:first]:
                row.zero_()
        with pytest.MonkeyPatch.context() as patch:
            if arm.fault == "tools count":
                patch.setattr(returns, "estimated", partial(_with_tools, returns.estimated))
            elif arm.fault == "values of a later mini-batch are its own":
                patch.setattr(module, "OwnValues", _each_its_own(module.OwnValues))
            output = worker.train_mini_batch(data)
        metrics = dict(tu.get(output, "metrics")) if output is not None else {}
        steps.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
        rows = tu.index_select_tensor_dict(data, list(range(first)))
        found = worker.values_of_update(rows) if arm.own else rows
        if found is not None and output is not None:
            values.append(found["values"].values().clone())
    held = dict(lean_engines._parameters(worker))
    for place, state in enumerate(lean_engines._adam(worker).state.values()):
        held |= {f"{place} {key}": getattr(value, "_local_tensor", value) for key, value in state.items()}
    return {
        "steps": steps,
        "values": values,
        "held": {name: one.detach().clone() for name, one in held.items()},
        "tokens": worker.engine.take_tokens() if arm.share else (0, 0, 0),
    }


def _each_its_own(build: Any) -> Any:
    return lambda loss, rewards, _: build(loss, rewards, None)


def _with_tools(estimated: Any, rewards: Any, values: Any, mask: Any, *more: float) -> Any:
    return estimated(rewards, values, mask * 0 + 1, *more)


_benches: dict[tuple[int, str], Bench] = {}


def compared(world: World, folder: Path, engine: str, arms: dict[str, Arm]) -> dict[str, dict[str, Any]]:
    """How arms differ from `stock`, and the tokens that were computed where prompts are computed once."""
    import torch

    if (world.size, engine) not in _benches:
        _benches[world.size, engine] = Bench(world, folder, engine)
    bench, ran = _benches[world.size, engine], {}
    for name, arm in arms.items():
        torch.manual_seed(0)
        ran[name] = run(bench, arm)
    return {
        name: lean_engines.difference(ran["stock"], ran[name])
        | {
            "first values": all(map(torch.equal, ran["stock"]["values"][:1], ran[name]["values"][:1])),
            "values": max(
                (float((a - b).abs().max()) for a, b in zip(ran["stock"]["values"], ran[name]["values"], strict=True)),
                default=0.0,
            ),
            "tokens": ran[name]["tokens"],
        }
        for name in arms.keys() - {"stock"}
    }
