"""An actor and a critic in verl's own TrainingWorkers on Megatron, four gloo processes, fixed batches: verl's PPO
losses, one after the other or fused.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import hashlib
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
from ranks import CONTEXT, Ranks, World

SAMPLES = 16
# What the host is called where verl is to offload from it.
ACCELERATOR = "accelerator"
VOCABULARY = 64
PRELOAD = ["verl.workers.engine_workers", "verl.workers.engine.megatron", "verl_fuse.runtime.executor", "mbridge"]
# What Megatron's own layers need on a CPU; the same as recipes/ppo-megatron-cpu.
TRANSFORMER = {
    "use_cpu_initialization": True,
    "sequence_parallel": False,
    "masked_softmax_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
    "persist_layer_norm": False,
    "batch_p2p_sync": False,
    "attention_softmax_in_fp32": True,
    "attention_backend": "local",
}


@dataclass(frozen=True)
class Model:
    """Sizes and batches of one model; `mini_batches` is per epoch, of all data-parallel ranks together."""

    tp: int = 1
    pp: int = 4
    mini_batches: int = 1
    micro_batch: int = 2
    epochs: int = 1
    tokens: int | None = None  # dynamic batch size: tokens per micro-batch


@dataclass(frozen=True)
class Case:
    """A run of the steps from `first` to before `steps`; `fault` is planted in a fused one.

    Without `together` captured calls run one model after the other. Everything is loaded from `load` before the first
    step, and saved in `save` after the last.
    """

    actor: Model = field(default_factory=Model)
    critic: Model = field(default_factory=Model)
    distributed_optimizer: bool = False
    clip: float = 1.0
    first: int = 0
    steps: int = 3
    load: Path | None = None
    save: Path | None = None
    fault: str = ""
    together: bool = True
    offload: bool = False  # verl empties storages between calls, and fills them again

    @property
    def models(self) -> dict[str, Model]:
        return {"actor": self.actor, "critic": self.critic}


@contextmanager
def cpu_server(*more: str) -> Iterator[None]:
    """Meanwhile `Ranks` are processes of the cpu platform, forked from a server of their own that has verl, Megatron
    and `more` modules loaded."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"VERL_PLATFORM": "cpu", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}.items():
            patch.setenv(name, value)
        # On a CPU with AVX-512 and AMX, stock and fused updates differ in the last bits unless oneDNN stays with AVX2.
        patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        # There is one server per process: an earlier module's was started in another environment.
        multiprocessing.forkserver._forkserver._stop()
        CONTEXT.set_forkserver_preload([*PRELOAD, *more])
        multiprocessing.forkserver.ensure_running()
        try:
            yield
        finally:
            multiprocessing.forkserver._forkserver._stop()
            CONTEXT.set_forkserver_preload(["verl_fuse.runtime.executor"])


def write_model(folder: Path) -> None:
    """A random Llama of four layers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


def worker(world: World, folder: Path, case: Case, name: str, kind: Any = None) -> Any:
    """verl's TrainingWorker of one model, or a subclass of it, initialised."""
    import types

    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import (
        HFModelConfig,
        McoreActorConfig,
        McoreEngineConfig,
        McoreOptimizerConfig,
        TrainingWorkerConfig,
    )
    from verl.workers.engine_workers import TrainingWorker
    from verl.workers.utils.losses import ppo_loss, value_loss

    os.environ |= {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }
    model, critic = case.models[name], name == "critic"
    model_config = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        use_remove_padding=False,
        override_config={"attn_implementation": "eager"},
    )
    model_config.tokenizer = types.SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None)
    engine_config = McoreEngineConfig(
        tensor_model_parallel_size=model.tp,
        pipeline_model_parallel_size=model.pp,
        sequence_parallel=False,
        use_distributed_optimizer=case.distributed_optimizer,
        vanilla_mbridge=True,
        use_dynamic_bsz=model.tokens is not None,
        max_token_len_per_gpu=model.tokens,
        micro_batch_size_per_gpu=model.micro_batch,
        override_transformer_config=TRANSFORMER,
        param_offload=case.offload,
        optimizer_offload=case.offload,
    )
    optimizer_config = McoreOptimizerConfig(
        lr=1e-2,
        clip_grad=case.clip,
        total_training_steps=10,
        lr_decay_style="cosine",
        min_lr=1e-3,
        use_checkpoint_opt_param_scheduler=True,
    )
    built = (kind or TrainingWorker)(
        TrainingWorkerConfig(
            model_type="value_model" if critic else "language_model",
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer_config,
            checkpoint_config=CheckpointConfig(),
        )
    )
    built.flops_counter = None
    built.reset()
    if critic:
        config: Any = types.SimpleNamespace(cliprange_value=0.5, loss_agg_mode="token-mean", loss_scale_factor=None)
        built.set_loss_fn(partial(value_loss, config=config))
    else:
        config = McoreActorConfig(
            rollout_n=1,
            ppo_mini_batch_size=8,
            ppo_micro_batch_size_per_gpu=2,
            use_dynamic_bsz=False,
            strategy="megatron",
        )
        built.set_loss_fn(partial(ppo_loss, config=config))
    return built


@contextmanager
def offloading() -> Iterator[None]:
    """Meanwhile engines of verl offload to the host as from an accelerator: the device is the host, but has another
    name, and what is emptied there is no longer there. No memory is pinned, which needs an accelerator."""
    import torch
    from verl.workers.engine import base
    from verl.workers.engine.megatron import transformer_impl

    empty = torch.empty
    with pytest.MonkeyPatch.context() as patch:
        for module in (base, transformer_impl):
            patch.setattr(module, "get_device_name", lambda: ACCELERATOR)
        patch.setattr(torch, "empty", lambda *sizes, pin_memory=False, **options: empty(*sizes, **options))
        yield


def storages(engine: Any) -> set[int]:
    """Sizes of the storages in which an engine's model has weights and gradients."""
    buffers = [buffer for chunk in engine.module for buffer in chunk.buffers]
    return {data.storage().size() for buffer in buffers for data in (buffer.param_data, buffer.grad_data)}


def batch(step: int, critic: bool) -> Any:
    """All samples of a step: prompts and responses of different lengths, and what the losses read."""
    import torch
    from tensordict import TensorDict

    draw = torch.Generator().manual_seed(100 + step)
    lengths = [(int(p), int(r)) for p, r in torch.randint(3, 12, (SAMPLES, 2), generator=draw)]

    def nested(make: Any, sizes: list[int]) -> torch.Tensor:
        return torch.nested.as_nested_tensor([make(size) for size in sizes], layout=torch.jagged)

    def ids(size: int) -> torch.Tensor:
        return torch.randint(1, VOCABULARY, (size,), generator=draw)

    def noise(size: int) -> torch.Tensor:
        return torch.randn(size, generator=draw)

    prompts, responses = [ids(p) for p, _ in lengths], [ids(r) for _, r in lengths]
    answers = [r for _, r in lengths]
    fields = {
        "input_ids": torch.nested.as_nested_tensor(
            [torch.cat(pair) for pair in zip(prompts, responses, strict=True)], layout=torch.jagged
        ),
        "loss_mask": torch.nested.as_nested_tensor(
            [torch.cat([torch.zeros(p), torch.ones(r)]) for p, r in lengths], layout=torch.jagged
        ),
        "prompts": torch.nested.as_nested_tensor(prompts, layout=torch.jagged),
        "responses": torch.nested.as_nested_tensor(responses, layout=torch.jagged),
        "response_mask": nested(torch.ones, answers),
        "temperature": torch.ones(SAMPLES),
    }
    if critic:
        fields |= {"values": nested(noise, answers), "returns": nested(noise, answers)}
    else:
        fields |= {
            "old_log_probs": nested(lambda n: -4 + 0.1 * noise(n), answers),
            "advantages": nested(noise, answers),
        }
    return TensorDict(fields, batch_size=[SAMPLES])


def share(name: str, model: Model, step: int, trained: Any) -> Any:
    """What this data-parallel rank trains on in a step, with what the trainer sends along."""
    from verl.utils import tensordict_utils as tu

    size, rank = trained.engine.get_data_parallel_size(), trained.engine.get_data_parallel_rank()
    data = batch(step, name == "critic")
    data = tu.chunk_tensordict(data, size)[rank] if size > 1 else data
    mini_batch = SAMPLES // model.mini_batches
    tu.assign_non_tensor(
        data,
        mini_batch_size=mini_batch,
        global_batch_size=mini_batch,
        epochs=model.epochs,
        seed=1,
        dataloader_kwargs={"shuffle": False},
    )
    return data


@dataclass(frozen=True)
class Trained:
    """The final state of a rank: parameters by (model, tp rank, pp stage, dp rank, name) as digests;
    metrics of each step by model."""

    parameters: dict[tuple, str]
    metrics: list[dict[str, Any]]
    fused: list[int]
    counts: list[tuple]


def train(world: World, folder: Path, case: Case, fused: bool) -> Trained:
    """Train both models: verl's own engines one after the other, or ours fused."""
    with open(os.devnull, "w") as silence, redirect_stdout(silence), offloading() if case.offload else nullcontext():
        return _train(world, folder, case, fused)


def _train(world: World, folder: Path, case: Case, fused: bool) -> Trained:
    if fused:
        from verl_fuse_pipeline.megatron.engine import use_views

        use_views()
    views = {name: None if fused else _stock_view(model) for name, model in case.models.items()}
    workers, fusion = _build(world, folder, case, views)
    metrics, counts, ran = [], [], []
    for step in range(case.first, case.steps):
        if fused:
            jobs = {
                name: partial(trained.train_mini_batch, share(name, case.models[name], step, trained))
                for name, trained in workers.items()
            }
            with _fault(case.fault):
                outputs, report = fusion.run(jobs, _Greedy(fusion), case.together)
            assert all(cost.forward > 0 and cost.backward > 0 for cost in report.costs.values())
            assert case.together or all(cost.activation > 0 for cost in report.costs.values())
            counts.append(report.counts)
            ran.append(report.fused)
        else:
            outputs = {}
            for name in ("critic", "actor"):
                with _active(views[name]):
                    outputs[name] = workers[name].train_mini_batch(share(name, case.models[name], step, workers[name]))
        metrics.append({name: _numbers(output) for name, output in outputs.items()})
        if case.offload:
            assert {size for trained in workers.values() for size in storages(trained.engine)} == {0}
    # Megatron writes checkpoints in a child process, which a daemon, as the test's ranks are, may not have.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    for name, trained in workers.items() if case.save is not None else ():
        with _active(views[name]):
            trained.save_checkpoint(str(case.save / name), global_step=case.steps)
    return Trained(_parameters(workers, views), metrics, ran, counts)


def _parameters(workers: dict[str, Any], views: Any) -> dict[tuple, str]:
    parameters = {}
    for name, trained in workers.items():
        with _active(views[name] or trained.engine.view):
            place = (name, *_place())
            if trained.engine.is_param_offload_enabled:
                trained.engine.to(ACCELERATOR)
        for module in trained.engine.module:
            for key, weight in module.named_parameters():
                parameters[*place, key] = _digest(weight)
                # The optimizer's own copy in full precision; with the distributed optimizer this rank's part of it.
                if (whole := getattr(weight, "main_param", None)) is not None:
                    parameters[*place, f"main {key}"] = _digest(whole)
    return parameters


def _place() -> tuple[int, int, int]:
    """Tensor-parallel rank, pipeline stage and data-parallel rank in the view in force."""
    from megatron.core import parallel_state as ps

    stage = ps.get_pipeline_model_parallel_rank()
    return ps.get_tensor_model_parallel_rank(), stage, ps.get_data_parallel_rank()


def _build(world: World, folder: Path, case: Case, views: Any) -> tuple[dict[str, Any], Any]:
    workers = {}
    for name in ("critic", "actor"):
        with _active(views[name]):
            workers[name] = worker(world, folder, case, name)
            if case.load is not None:
                workers[name].load_checkpoint(str(case.load / name))
    if any(views.values()):
        return workers, None
    from verl_fuse_pipeline.megatron.fusion import Fusion

    engines = {name: trained.engine for name, trained in workers.items()}
    return workers, Fusion(engines, timeout=60.0)


class _Greedy(dict):
    """A fused schedule for whatever numbers of micro-batches both models have."""

    def __init__(self, fusion: Any) -> None:
        self._fusion = fusion

    def get(self, counts: tuple[int, int], default: Any = None) -> Any:
        from verl_fuse.schedule.methods import solve
        from verl_fuse.schedule.solution import Budget
        from verl_fuse.spec.problem import Pipeline, ScheduleProblem

        if 0 in counts:
            return None
        if counts not in self:
            pipelines = [
                Pipeline(name, ranks, count, 4 / len(ranks), 8 / len(ranks), 1)
                for (name, copies), count in zip(self._fusion.placements.items(), counts, strict=True)
                for ranks in copies
            ]
            ranks = 1 + max(rank for p in pipelines for rank in p.ranks)
            self[counts] = solve(ScheduleProblem(ranks, tuple(pipelines)), "greedy", Budget(30.0))
        return self[counts]


@contextmanager
def _fault(fault: str) -> Iterator[None]:
    """The actor's micro-batches in another order, or one of them twice."""
    from verl_fuse_pipeline.megatron import fusion

    with pytest.MonkeyPatch.context() as patch:
        if fault:
            captured = fusion.CapturedCall

            def broken(request: Any, padding: Any) -> Any:
                if (
                    request["num_microbatches"] > 1
                    and "WithLMHead" in type(request["forward_step_func"].func.__self__).__name__
                ):
                    batches = [next(request["data_iterator"]) for _ in range(request["num_microbatches"])]
                    batches = batches[::-1] if fault == "permuted" else [batches[0], *batches[:1], *batches[2:]]
                    request = {**request, "data_iterator": iter(batches)}
                return captured(request, padding)

            patch.setattr(fusion, "CapturedCall", broken)
        yield


_stock_views: dict[tuple[int, int], Any] = {}


def _stock_view(model: Model) -> Any:
    """Megatron's own layout, for engines of stock verl: one per sizes, as this process trains several cases."""
    from verl_fuse_pipeline.megatron.view import View

    return _stock_views.setdefault((model.tp, model.pp), View("stock"))


def _active(view: Any) -> Any:
    return nullcontext() if view is None else view.active()


def _digest(weight: Any) -> str:
    return hashlib.sha256(weight.detach().float().numpy().tobytes()).hexdigest()[:16]


def _numbers(output: Any) -> Any:
    """verl's metrics, without times and memory."""
    if output is None:
        return None
    from verl.utils import tensordict_utils as tu

    metrics = tu.get(output, "metrics")
    return {key: str(value) for key, value in sorted(metrics.items()) if not key.startswith("perf/")}


def update_workers(world: World, folder: Path) -> tuple[list[tuple], dict[tuple, str]]:
    """Updates through the classes that Ray workers have: measured first, then in the order that a solver
    finds for what was measured.

    Without Ray: classes, orders and reports are pickled as Ray does it. Of each step: calls, how many were fused,
    spans, whether verl's outputs of critic and actor are there; then parameters as in `Trained`.
    """
    import torch.distributed as dist
    from ray import cloudpickle
    from verl.workers import engine_workers

    from verl_fuse.host.record.spans import Recorder
    from verl_fuse.host.worker import recording_worker_class
    from verl_fuse_pipeline.megatron import worker as module
    from verl_fuse_pipeline.policy import fused_schedule
    from verl_fuse_pipeline.report import UpdateOrder
    from verl_fuse_pipeline.schedules import UpdateSchedules

    def sent(value: Any) -> Any:
        return cloudpickle.loads(cloudpickle.dumps(value))

    bases = {"critic": engine_workers.TrainingWorker, "actor": engine_workers.ActorRolloutRefWorker}
    classes = {
        name: sent(recording_worker_class(name, module.pipeline_worker_class(name, base)))
        for name, base in bases.items()
    }
    case = Case()
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        module.use_views()
        critic = worker(world, folder, case, "critic", classes["critic"])
        inner = worker(world, folder, case, "actor")
    spans: list[Any] = []
    critic._verl_fuse_recorder = Recorder(spans.append)
    # verl's outer actor worker also holds a rollout engine; what an update asks of it is this.
    actor = object.__new__(classes["actor"])
    actor.actor, actor.profiler, actor.enable_routing_replay = inner, inner.profiler, False
    module._workers["actor"] = actor
    schedules = UpdateSchedules(partial(fused_schedule, wanted="fused", seconds=1.0))
    order, steps = UpdateOrder(False, {}, 60.0), []
    for step in range(case.steps):
        shares = [
            share(name, case.models[name], step, trained) for name, trained in (("critic", critic), ("actor", inner))
        ]
        of_critic, of_actor, report = critic.fused_update(*shares, sent(order))
        outputs = _numbers(of_critic) is not None, _numbers(of_actor) is not None
        assert tuple(spans) == report.spans, "recorded where they were measured"
        spans.clear()
        steps.append((report.counts, report.fused, len(report.spans), *outputs))
        reports: list[Any] = [None] * world.size
        dist.all_gather_object(reports, report)
        if world.rank == 0:
            schedules.learn(reports)
            schedules.wait()
            found = {counts: schedule.to_json() for counts, schedule in schedules.ready().items()}
            order = UpdateOrder(bool(found), found, 60.0)
        orders = [order]
        dist.broadcast_object_list(orders)
        order = orders[0]
    return steps, _parameters({"critic": critic, "actor": inner}, {"critic": None, "actor": None})


def exported(world: World, folder: Path) -> dict[str, str]:
    """Digests of the actor's weights as its engine hands them to a rollout, by name, iterated
    over outside of any view."""
    from verl_fuse_pipeline.megatron.engine import use_views

    use_views()
    case = Case(actor=Model(tp=2, pp=2), critic=Model(tp=2, pp=2), distributed_optimizer=True)
    with open(os.devnull, "w") as silence, redirect_stdout(silence):
        worker(world, folder, case, "critic")
        weights, _ = worker(world, folder, case, "actor").engine.get_per_tensor_param()
        return {name: _digest(weight) for name, weight in weights}


__all__ = ["Case", "Model", "Ranks", "Trained", "cpu_server", "exported", "train", "update_workers", "write_model"]
