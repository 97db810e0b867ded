"""An actor in verl's own TrainingWorker, in the lean one, with logits of responses alone, and with prompts computed
once, on FSDP or Megatron, gloo processes, fixed batches: several steps of each, side by side.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import copy
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import sharded_engines
import small_engines
from ranks import World

STEPS = 3
SAMPLES = 16
GROUP = 4
KL = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl"}


@dataclass(frozen=True)
class Arm:
    """How three steps are trained: by stock verl (`lean` is None) or leanly, with logits of all tokens or of
    `responses` alone, each prompt computed for each sample or once (`share`), in verl's order of rows or balanced
    within mini-batches (`balance`); `fault` is planted. `prompts`: samples of a group have the same one; `turns`: the
    last two of them are later turns of the first one. `temperature`: of the whole batch; None: 1.0 for each row. `eps`
    is Adam's: with a small one the first steps make much of the rounding in a gradient that is nearly 0."""

    lean: dict[str, Any] | None = None
    responses: bool = False
    share: bool = False
    prompts: bool = False
    turns: bool = False
    balance: bool = False
    micro_batch: int = 2
    tokens: int | None = None
    mini_batches: int = 1
    epochs: int = 1
    loss: str = "vanilla"
    agg: str = "token-mean"
    actor: dict[str, Any] = field(default_factory=dict)
    own: bool = False  # old log-probs are the model's: by verl's pass, or left to the update
    fault: str = ""
    packed: bool = False
    padding: bool = True
    temperature: float | None = None
    eps: float = 1e-8


def write_model(folder: Path) -> None:
    """A random Llama of two layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)  # livelier than a fresh model
    model.save_pretrained(folder / "actor")


# FSDP1 and FSDP2: with parameters that stay gathered between forward and backward pass, with activations that wait in
# the host's memory, with adapters alone trained, with activations that are kept, with rows that two ranks share; FSDP1
# with verl's other form of parameters, FSDP2 computed in bfloat16.
_FORMS: dict[str, dict[str, Any]] = {
    "": {},
    " whole": {"reshard_after_forward": False},
    " offloaded": {"activation_offload": True},
    " lora": {"lora_rank": 4},
    " kept": {"gradient_checkpointing": False},
    " shared": {"sequence_ranks": 2},
}
SHARDED: dict[str, dict[str, Any]] = {
    f"{strategy}{form}": {"strategy": strategy, **change}
    for strategy in ("fsdp", "fsdp2")
    for form, change in _FORMS.items()
} | {
    "fsdp named": {"strategy": "fsdp", "use_orig_params": True},
    "fsdp2 bf16": {"strategy": "fsdp2", "param_dtype": "bf16"},
}


def _without_pinned_memory() -> None:
    """verl offloads activations to pinned memory, which only a host with an accelerator has."""
    from verl.utils.activation_offload import SynchronizedGroupOffloadHandler

    SynchronizedGroupOffloadHandler.offload = partial(SynchronizedGroupOffloadHandler.offload, pin_memory=False)


class Bench:
    """Workers of an engine, each built for its first arm and kept."""

    def __init__(self, world: World, folder: Path, engine: str) -> None:
        from verl_fuse_update.lean.worker import LeanTrainingWorker

        if engine in SHARDED:
            if "offloaded" in engine:
                _without_pinned_memory()
            build = partial(sharded_engines.worker, world, folder, "actor", **SHARDED[engine])
        else:
            sizes = small_engines.Model(pp=int(engine.removeprefix("megatron pp") or 1))
            # As verl's default; without it verl saves no checkpoint on a CPU.
            case = small_engines.Case(actor=sizes, critic=sizes, distributed_optimizer=True)
            build = partial(small_engines.worker, world, folder / "actor", case, "actor")
        self.keep(engine, build, LeanTrainingWorker)

    def keep(self, engine: str, build: Any, lean: type) -> None:
        """Build workers by `build`, those of lean arms of the class `lean`."""
        self.engine, self.build, self._lean, self._workers = engine, build, lean, {}
        self.first = {name: tensor.detach().clone() for name, tensor in _parameters(self.worker(Arm())).items()}

    def worker(self, arm: Arm) -> Any:
        from verl_fuse.host.inference.response_logits import keep_response_logits
        from verl_fuse.host.sharing.engine import share_prompts

        kind = arm.lean is not None, arm.responses, arm.share
        if kind not in self._workers:
            with open(os.devnull, "w") as silence, redirect_stdout(silence):
                self._workers[kind] = self.build(kind=self._lean if arm.lean is not None else None)
            if arm.responses:
                keep_response_logits(self._workers[kind].engine, strict=True)
            if arm.share:
                share_prompts(self._workers[kind].engine, strict=True)
        return self._workers[kind]

    def restore(self, worker: Any) -> None:
        """Parameters, moments and learning rate as after the model was built."""
        import torch

        from verl_fuse.host.weights.gathered import reshard

        if self.engine.startswith("fsdp"):
            # A planted fault leaves parameters gathered.
            reshard(worker.engine.module)
        with torch.no_grad():
            for name, tensor in _parameters(worker).items():
                tensor.copy_(self.first[name])
        _adam(worker).state.clear()
        worker.engine.optimizer_zero_grad()
        scheduler = worker.engine.lr_scheduler
        if self.engine in SHARDED:
            scheduler.last_epoch = 0
            scheduler._step_count = 1
            for group, rate in zip(scheduler.optimizer.param_groups, scheduler.base_lrs, strict=True):
                group["lr"] = scheduler.lr_lambdas[0](0) * rate
        else:
            scheduler.num_steps = 0
            scheduler.step(0)


def _parameters(worker: Any) -> dict[str, Any]:
    modules = worker.engine.module if isinstance(worker.engine.module, list) else [worker.engine.module]
    found = {}
    for place, module in enumerate(modules):
        for name, parameter in module.named_parameters():
            found[f"{place} {name}"] = getattr(parameter, "_local_tensor", parameter)
            # Megatron's copy in full precision.
            if (whole := getattr(parameter, "main_param", None)) is not None:
                found[f"{place} main {name}"] = whole
    return found


def _adam(worker: Any) -> Any:
    optimizer = worker.engine.optimizer
    while hasattr(optimizer, "chained_optimizers") or hasattr(optimizer, "optimizer"):
        optimizer = optimizer.chained_optimizers[0] if hasattr(optimizer, "chained_optimizers") else optimizer.optimizer
    return optimizer


def batch(step: int, zeros: str, padding: bool, same_prompts: bool = False, turns: bool = False) -> Any:
    """All samples of a step, group after group: 0/1 rewards with equal ones in some groups, and
    a row of padding or none. With the same prompts in a group the second one has a prompt of a single token, and rows
    of all groups alternate.

    `zeros`: "some" groups, those of "rank 1", "all", or "none"."""
    import torch
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import index_select_tensor_dict

    draw = torch.Generator().manual_seed(100 + step)
    rows = []
    for group in range(SAMPLES // GROUP):
        rewards = torch.tensor([0.0, 1.0, *torch.randint(0, 2, (GROUP - 2,), generator=draw).tolist()])
        equal = {"some": group % 2 == 0, "rank 1": group >= 2, "all": True, "none": False}[zeros]
        advantages = torch.zeros(GROUP) if equal else (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for sample in range(GROUP):
            prompt, response = torch.randint(3, 12, (2,), generator=draw).tolist()
            if same_prompts:
                prompt = 1 if group == 1 else 3 + 4 * group
            rows.append((prompt, response, float(advantages[sample])))
    # The last but one row: no token of it counts, and its advantages are 0.
    empty = SAMPLES - 2 if padding else None
    masks = [torch.zeros(r) if place == empty else torch.ones(r) for place, (_, r, _) in enumerate(rows)]
    advantages = [a * mask for (_, _, a), mask in zip(rows, masks, strict=True)]

    def nested(tensors: Sequence[Any]) -> Any:
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    def noise(scale: float) -> Any:
        return nested([-4 + scale * torch.randn(r, generator=draw) for _, r, _ in rows])

    prompts = [torch.randint(1, 64, (p,), generator=draw) for p, _, _ in rows]
    if same_prompts:
        prompts = [prompts[place - place % GROUP] for place in range(SAMPLES)]
    responses = [torch.randint(1, 64, (r,), generator=draw) for _, r, _ in rows]
    for place in range(SAMPLES) if turns else ():
        if place % GROUP >= GROUP - 2:
            before = place - (GROUP - 2 if place % GROUP == GROUP - 2 else 1)
            prompts[place] = torch.cat([prompts[before], responses[before], torch.tensor([1])])
    rows = [(len(prompt), r, a) for prompt, (_, r, a) in zip(prompts, rows, strict=True)]
    fields = {
        "input_ids": nested([torch.cat(pair) for pair in zip(prompts, responses, strict=True)]),
        "position_ids": nested([torch.arange(p + r) for p, r, _ in rows]),
        "prompts": nested(prompts),
        "responses": nested(responses),
        "response_mask": nested(masks),
        "loss_mask": nested([torch.cat([torch.zeros(p), m]) for (p, _, _), m in zip(rows, masks, strict=True)]),
        "advantages": nested(advantages),
        "old_log_probs": noise(0.1),
        "ref_log_prob": noise(0.3),
        "temperature": torch.ones(SAMPLES),
    }
    found = TensorDict(fields, batch_size=[SAMPLES])
    groups = SAMPLES // GROUP
    alternating = [group * GROUP + sample for sample in range(GROUP) for group in range(groups)]
    return index_select_tensor_dict(found, alternating) if same_prompts else found


def run(
    bench: Bench, arm: Arm, zeros: Sequence[str], first: int = 0, load: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Train the steps from `first` on, from and to a checkpoint; of each step verl's metrics, then what every rank
    holds: parameters and Adam's state."""
    from verl.utils import tensordict_utils as tu

    from verl_fuse_update.lean.options import LEAN, LeanOptions

    worker = bench.worker(arm)
    lean = LeanOptions(**arm.lean or {})
    bench.restore(worker)
    if load is not None:
        worker.load_checkpoint(str(load))
    _set_loss(bench, worker, arm)
    for group in _adam(worker).param_groups:
        group["eps"] = arm.eps
    engine, steps = worker.engine, []
    for step, kind in enumerate(zeros, first):
        data = _share(engine, arm, step, kind)
        tu.assign_non_tensor(
            data,
            **({LEAN: lean} if arm.lean else {}),
            mini_batch_size=SAMPLES // arm.mini_batches,
            global_batch_size=SAMPLES // arm.mini_batches,
            epochs=arm.epochs,
            seed=1,
            dataloader_kwargs={"shuffle": False},
            calculate_entropy=arm.actor.get("calculate_entropy", False),
        )
        if arm.own:
            _own(worker, data, arm, lean)
        with _fault(worker, arm.fault, arm.lean is not None, data, nothing=kind == "all"):
            output = worker.train_mini_batch(data)
        metrics = dict(tu.get(output, "metrics")) if output is not None else {}
        steps.append({key: value for key, value in metrics.items() if not key.startswith("perf/")})
        if arm.own and lean.skip_old_log_prob:
            worker.log_probs_of_update(data)
    if save is not None:
        # Megatron writes checkpoints in a child process, which a daemon, as the test's ranks are, may not have.
        multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
        worker.save_checkpoint(str(save), global_step=first + len(zeros))
    adam = _adam(worker)
    held = dict(_parameters(worker))
    for place, state in enumerate(adam.state.values()):
        held |= {f"{place} {key}": getattr(value, "_local_tensor", value) for key, value in state.items()}
    return {"steps": steps, "held": {name: tensor.detach().clone() for name, tensor in held.items()}}


def _share(engine: Any, arm: Arm, step: int, zeros: str) -> Any:
    """The rows of this rank, with verl's keys for one pass over them."""
    from verl.utils import tensordict_utils as tu

    size, rank = engine.get_data_parallel_size(), engine.get_data_parallel_rank()
    data = _placed(batch(step, zeros, arm.padding, arm.prompts, arm.turns), arm, size)
    data = tu.chunk_tensordict(data, size)[rank] if size > 1 else data
    if arm.temperature is not None:
        data.pop("temperature")
        tu.assign_non_tensor(data, temperature=arm.temperature)
    tu.assign_non_tensor(
        data,
        use_dynamic_bsz=arm.tokens is not None,
        max_token_len_per_gpu=arm.tokens,
        micro_batch_size_per_gpu=arm.micro_batch,
        use_remove_padding=arm.packed,
    )
    return data


def _placed(data: Any, arm: Arm, ranks: int) -> Any:
    """The rows of a step, in the order in which they are cut over ranks."""
    import torch
    from verl.utils.seqlen_balancing import calculate_workload
    from verl.utils.tensordict_utils import index_select_tensor_dict

    from verl_fuse_update.balance import Cut, Prompts, balanced

    if not arm.balance:
        return data
    cut = Cut(ranks, SAMPLES // arm.mini_batches, None if arm.tokens else arm.micro_batch, not arm.packed)
    lengths, answers = (data[name].offsets().diff() for name in ("input_ids", "responses"))
    groups = [place % (SAMPLES // GROUP) for place in range(SAMPLES)]
    prompts = Prompts(groups, calculate_workload(lengths - answers - 1).tolist()) if arm.prompts else None
    order = balanced(calculate_workload(lengths).tolist(), cut, prompts)
    assert arm.prompts or order != list(range(SAMPLES))
    if arm.fault == "a row in another mini-batch":
        order[0], order[cut.part] = order[cut.part], order[0]
    return index_select_tensor_dict(data, torch.tensor(order).tolist())


def _set_loss(bench: Bench, worker: Any, arm: Arm) -> None:
    from verl.workers.config import FSDPActorConfig, McoreActorConfig
    from verl.workers.config.actor import PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    kind = FSDPActorConfig if bench.engine in SHARDED else McoreActorConfig
    config = kind(
        rollout_n=1,
        ppo_mini_batch_size=8,
        ppo_micro_batch_size_per_gpu=2,
        use_dynamic_bsz=False,
        strategy=bench.engine.split()[0],
        loss_agg_mode=arm.agg,
        policy_loss=PolicyLossConfig(loss_mode=arm.loss, dro_beta=0.1),
        **arm.actor,
    )
    worker.set_loss_fn(partial(ppo_loss, config=config))


def _own(worker: Any, data: Any, arm: Arm, lean: Any) -> None:
    """Old log-probs of the model: by verl's pass, or left to the update, which gets 0 for what it has to compute."""
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    if lean.skip_old_log_prob and arm.mini_batches == 1:
        data.pop("old_log_probs")
        return
    rows = data.clone(recurse=False)
    tu.assign_non_tensor(rows, compute_loss=False, calculate_entropy=True)
    output = worker.infer_batch(rows)
    if output is not None:
        data["old_log_probs"] = response_from_nested(output["log_probs"], data["response_mask"])
    if lean.skip_old_log_prob:
        passed = [bool(row.any()) or not lean.short_pass for row in data["advantages"].unbind()]
        for row, old in enumerate(data["old_log_probs"].unbind()):
            if row < len(data) // arm.mini_batches or not passed[row]:
                old.zero_()


@contextmanager
def _fault(worker: Any, fault: str, lean: bool, data: Any, nothing: bool) -> Iterator[None]:
    """What must show in a comparison; `nothing`: no sample of the step has a gradient."""
    import torch

    from verl_fuse.host.inference import response_logits
    from verl_fuse.host.sharing import engine, plan
    from verl_fuse_update.lean import mini_batch

    with pytest.MonkeyPatch.context() as patch:
        if fault == "skips a small advantage":
            # One sample that counts, by little.
            tiny = data["advantages"].unbind()[0]
            tiny.fill_(1e-3)
            if lean:
                large = [bool((row.abs() > 0.01).any()) for row in data["advantages"].unbind()]
                patch.setattr(mini_batch, "has_gradient", lambda _: large)
        elif fault == "wrong denominator":
            split = mini_batch.LeanMiniBatch._split

            def counted(self: Any, stock: Any, data: Any, **request: Any) -> Any:
                from verl.utils import tensordict_utils as tu

                tu.assign_non_tensor(data, batch_num_tokens=0.9 * data["batch_num_tokens"])
                return split(self, stock, data, **request)

            patch.setattr(mini_batch.LeanMiniBatch, "_split", counted)
        elif fault == "parameters stay gathered" and lean:
            patch.setattr(mini_batch, "reshard", lambda module: None)
        elif fault == "old log-probs of a later mini-batch are its own":
            build = mini_batch.LeanMiniBatch.__init__

            def each(self: Any, engine: Any, data: Any, options: Any, loss: Any, fresh: bool, first: Any) -> None:
                build(self, engine, data, options, loss, True)

            patch.setattr(mini_batch.LeanMiniBatch, "__init__", each)
        elif fault == "off by one":
            right = response_logits.response_positions
            patch.setattr(response_logits, "response_positions", lambda rows: right(rows) + 1)
        elif fault == "a branch sees its sibling":
            lay_out = plan.SharedPlan.__init__

            def siblings(self: Any, *args: Any) -> None:
                lay_out(self, *args)
                for number, (first, _, prompt, end) in enumerate(self.segments):
                    if first > end > prompt:
                        # In place of the prompt's last key, one of the branch before.
                        self.keys[self.key_starts[number] + end - prompt - 1] = first - 1

            patch.setattr(plan.SharedPlan, "__init__", siblings)
        elif fault == "positions restart at a branch":
            right_rows = engine.compact

            def restarted(*args: Any) -> Any:
                rows = right_rows(*args)
                rows["position_ids"].values()[:] = torch.cat([torch.arange(n) for n in args[1].lengths])
                return rows

            patch.setattr(engine, "compact", restarted)
        elif fault == "the prompt's last token is shared":
            patch.setattr(plan, "shared_tokens", lambda length, answer: length - answer)
        elif fault == "no step" and nothing:
            # Moments and learning rate go on without a gradient.
            patch.setattr(worker.engine, "optimizer_step", lambda: 0.0)
        yield


def difference(one: dict[str, Any], other: dict[str, Any]) -> dict[str, float]:
    """How two arms differ on this rank: parameters and moments (l2 of all together, relative); loss, gradient norm and
    other metrics of all steps."""
    import torch

    def flat(held: dict[str, Any], end: str | tuple[str, ...]) -> Any:
        chosen = [t.double().flatten() for name, t in sorted(held.items()) if name.endswith(end)]
        return torch.cat(chosen)

    def relative(end: str | tuple[str, ...]) -> float:
        first, second = flat(one["held"], end), flat(other["held"], end)
        return float((first - second).norm() / first.norm().clamp_min(1e-30))

    found = {"exp_avg": relative("exp_avg"), "exp_avg_sq": relative("exp_avg_sq")}
    # FSDP1 has the weights of a module in one flat parameter.
    found["parameters"] = relative(("weight", "_flat_param"))
    found["bitwise"] = float(all(torch.equal(t, other["held"][name]) for name, t in one["held"].items()))
    for step, (mine, theirs) in enumerate(zip(one["steps"], other["steps"], strict=True)):
        for key, value in mine.items():
            a, b = _number(value), _number(theirs[key]) if key in theirs else float("nan")
            name = key if key in ("loss", "grad_norm") else "metrics"
            gap = abs(a - b) / max(abs(a), 1e-30) if name == "grad_norm" else abs(a - b)
            found[name] = max(found.get(name, 0.0), gap) if gap == gap else gap
        assert mine.keys() <= theirs.keys(), (step, mine.keys() ^ theirs.keys())
    return found


def _number(value: Any) -> float:
    import numpy as np

    return float(np.mean(value.values if hasattr(value, "values") else value))


_benches: dict[tuple[int, str], Bench] = {}


def _bench(world: World, folder: Path, engine: str) -> Bench:
    if (world.size, engine) not in _benches:
        _benches[world.size, engine] = Bench(world, folder, engine)
    return _benches[world.size, engine]


def compared(
    world: World,
    folder: Path,
    engine: str,
    arms: dict[str, Arm],
    zeros: Sequence[str],
    pairs: Sequence[tuple[str, str]],
) -> dict[str, dict[str, float]]:
    """Differences of pairs of arms, by "one - other"."""
    import torch

    bench, ran = _bench(world, folder, engine), {}
    for name, arm in arms.items():
        torch.manual_seed(0)
        ran[name] = run(bench, arm, zeros)
    return {f"{one} - {other}": difference(ran[one], ran[other]) for one, other in pairs} | {
        "metrics": {name: found["steps"] for name, found in ran.items()}
    }


def passes(world: World, folder: Path, engine: str, arms: dict[str, Arm]) -> dict[str, dict[str, Any]]:
    """Of each arm, verl's pass for log-probs and entropies over the rows of this rank: the values of responses, those
    at the other tokens, the positions that had logits, and tokens and responses of the rows; the tokens of prompts and
    those of them that were computed, where prompts are computed once, and of each prompt its rows and the tokens that
    these share."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.workers.utils.padding import response_from_nested

    bench, found = _bench(world, folder, engine), {}
    for name, arm in arms.items():
        worker = bench.worker(arm)
        bench.restore(worker)
        data, logits = _share(worker.engine, arm, 0, "some"), list[int]()
        tu.assign_non_tensor(data, compute_loss=False, calculate_entropy=True)
        (head,) = [part for name, part in worker.engine.module.named_modules() if name.endswith("lm_head")]

        def count(_head: Any, _input: Any, made: Any, counts: list[int] = logits) -> None:
            counts.append(made.shape[:-1].numel())

        hook = head.register_forward_hook(count)
        take = getattr(worker.engine, "take_tokens", lambda: (0, 0, 0))
        take()
        with _fault(worker, arm.fault, False, data, nothing=False):
            output = worker.infer_batch(data)
        hook.remove()
        answers = data["responses"].offsets().diff().tolist()
        ends = data["input_ids"].offsets()[1:].tolist()
        others = torch.ones(ends[-1], dtype=torch.bool)
        for end, answer in zip(ends, answers, strict=True):
            others[end - answer - 1 : end - 1] = False
        found[name] = {"logits": sum(logits), "tokens": ends[-1], "responses": sum(answers)}
        found[name]["prompts"] = take()[1:]
        found[name]["groups"] = _groups(data)
        for key in ("log_probs", "entropy") if output is not None else ():
            found[name][key] = response_from_nested(output[key], data["response_mask"]).values()
            found[name][f"other {key}"] = output[key].values()[others]
    return found


def _groups(data: Any) -> list[tuple[int, int]]:
    prompts: dict[tuple[int, ...], int] = {}
    for row, answer in zip(data["input_ids"].unbind(), data["responses"].unbind(), strict=True):
        prompt = tuple(row[: len(row) - len(answer)].tolist())
        prompts[prompt] = prompts.get(prompt, 0) + 1
    return [(rows, len(prompt) - 1) for prompt, rows in prompts.items()]


def refused_sharing(world: World, folder: Path) -> dict[str, Any]:
    """What is said of an actor that cannot compute a prompt once, by the reason; the engine's class where it is left as
    it is; and what a call without a plan says."""
    from transformers import PreTrainedModel

    from verl_fuse.errors import FuseError
    from verl_fuse.host.sharing.engine import share_prompts
    from verl_fuse_update.lean.options import LeanOptions

    worker = _bench(world, folder, "fsdp2").build()
    engine = worker.engine
    config = next(part for part in engine.module.modules() if isinstance(part, PreTrainedModel)).config
    found: dict[str, Any] = {"left": []}
    changes = {
        "type": ("model_type", "other"),
        "dropout": ("attention_dropout", 0.1),
        "router": ("output_router_logits", True),
        "softcap": ("attn_logit_softcapping", 30.0),
        "ahead": ("use_bidirectional_attention", True),
        "rope": ("rope_parameters", {"full_attention": {"rope_type": "dynamic", "factor": 2.0}}),
    }
    for name, (key, value) in changes.items():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(config, key, value, raising=False)
            with pytest.raises(FuseError) as refused:
                share_prompts(engine, strict=True)
            share_prompts(engine, strict=False)
            found[name] = str(refused.value)
            found["left"].append(type(engine).__name__)
    import torch

    model = next(part for part in engine.module.modules() if isinstance(part, PreTrainedModel))
    model.dropped = torch.nn.Dropout(0.1)
    engine.use_ulysses_sp = True
    for name, undo in (("layer", lambda: delattr(model, "dropped")), ("engine", lambda: None)):
        with pytest.raises(FuseError) as refused:
            share_prompts(engine, strict=True)
        found[name] = str(refused.value)
        undo()
    engine.use_ulysses_sp = False
    stock = type(model)
    model.__class__ = type("Own", (stock,), {"__module__": "transformers_modules.own"})
    with pytest.raises(FuseError) as refused:
        share_prompts(engine, strict=True)
    found["code"] = str(refused.value)
    model.__class__ = stock
    share_prompts(engine, strict=True)

    with pytest.raises(FuseError) as refused:
        engine.module(input_ids=torch.ones(1, 3, dtype=torch.long), use_cache=False)
    found["called"] = str(refused.value)
    # A layer with a configuration of its own.
    own = model.model.layers[1].self_attn.config = copy.deepcopy(config)
    own._attn_implementation = "eager"
    arm = Arm(packed=True, tokens=60, prompts=True)
    with pytest.raises(FuseError) as refused:
        _own(worker, _share(engine, arm, 0, "some"), arm, LeanOptions())
    found["replaced"] = str(refused.value)
    return found


def refused_models(world: World, folder: Path) -> dict[str, Any]:
    """What is said of an actor that cannot have logits of responses alone, by the reason, and what stays of its engine
    where it may be left as it is."""
    from transformers import LlamaForCausalLM

    from verl_fuse.errors import FuseError
    from verl_fuse.host.inference.response_logits import keep_response_logits
    from verl_fuse_update.lean.options import LeanOptions

    class Whole(LlamaForCausalLM):
        def forward(self, input_ids: Any, attention_mask: Any, position_ids: Any, use_cache: bool) -> Any: ...

    class Ignoring(LlamaForCausalLM):
        def forward(self, logits_to_keep: Any = 0, **inputs: Any) -> Any:
            return super().forward(**inputs)

    def refusal(engine: Any) -> str:
        with pytest.raises(FuseError) as refused:
            keep_response_logits(engine, strict=True)
        keep_response_logits(engine, strict=False)
        left.append(type(engine).__name__)
        return str(refused.value)

    worker = _bench(world, folder, "fsdp2").build()
    critic = sharded_engines.worker(world, folder, "critic")
    left: list[str] = []
    found: dict[str, Any] = {"left": left, "critic": refusal(critic.engine)}
    worker.engine.model_config.hf_config.vision_config = {}
    found["tower"] = refusal(worker.engine)
    del worker.engine.model_config.hf_config.vision_config
    stock, worker.engine.module.__class__ = worker.engine.module.__class__, Whole
    found["forward"] = refusal(worker.engine)
    worker.engine.module.__class__ = type("Remote", (Ignoring, stock), {})
    found["remote"] = refusal(worker.engine)
    # As if it were transformers' own.
    worker.engine.module.__class__ = type("Ignoring", (Ignoring, stock), {"__module__": LlamaForCausalLM.__module__})
    keep_response_logits(worker.engine, strict=True)
    with pytest.raises(FuseError) as refused:
        _own(worker, _share(worker.engine, Arm(packed=True), 0, "some"), Arm(), LeanOptions())
    return found | {"ignored": str(refused.value)}


def resumed(
    world: World, folder: Path, engine: str, stock: Arm, pairs: dict[str, tuple[Arm, Arm]], checkpoints: Path
) -> dict[str, dict[str, float]]:
    """Of runs that end after their first step and go on from its checkpoint as another arm: how they differ from one of
    `stock` that never ends."""
    zeros = ("some", "rank 1", "some")
    bench, found = _bench(world, folder, engine), {}
    whole = run(bench, stock, zeros)
    for name, (before, after) in pairs.items():
        began = run(bench, before, zeros[:1], save=checkpoints / name)
        went_on = run(bench, after, zeros[1:], first=1, load=checkpoints / name)
        found[name] = difference(whole, {"steps": began["steps"] + went_on["steps"], "held": went_on["held"]})
    return found
