"""Declares contracts on the worker classes we subclass and the methods we wrap: their dispatch by Ray decides the calls
that a lane may make (worker.py, lane.py)."""

from verl_fuse.host.upstream.targets import ENGINE_WORKERS
from verl_fuse.spec.contract import Class, Contract, Decorator, names

DECORATOR = "verl.single_controller.base.decorator"

CONTRACTS: tuple[Contract, ...] = (
    Class(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", ("Worker",)),
    Class(f"{ENGINE_WORKERS}:TrainingWorker", ("Worker",)),
    *names(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker",
        "compute_log_prob compute_ref_log_prob update_actor update_weights save_checkpoint",
        closed=True,
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_log_prob",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='actor'))",
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_ref_log_prob",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='ref'))",
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_actor",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='actor'))",
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_weights",
        "register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)",
    ),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.save_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "infer_batch train_mini_batch save_checkpoint", closed=True),
    Decorator(
        f"{ENGINE_WORKERS}:TrainingWorker.infer_batch",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='train'), blocking=False)",
    ),
    Decorator(
        f"{ENGINE_WORKERS}:TrainingWorker.train_mini_batch",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='train'), blocking=False)",
    ),
    Decorator(f"{ENGINE_WORKERS}:TrainingWorker.save_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    # Our wrappers keep the attributes that it sets on a method.
    *names(DECORATOR, "register make_nd_compute_dataproto_dispatch_fn"),
    *names("verl.single_controller.base.worker:Worker", "rank()"),
    # The path of an update through a mini-batch, parts of which update/megatron and update/lean change.
    *names("verl.workers.engine.megatron.transformer_impl:MegatronEngine", "forward_backward_batch"),
    *names(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead",
        "forward_step postprocess_micro_batch_func",
    ),
    *names("verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead", "forward_step"),
    *names(f"{ENGINE_WORKERS}:TrainingWorker", "train_batch", closed=True),
    *names("verl.workers.engine.base:BaseEngine", "train_batch"),
    *names("verl.utils.tensordict_utils", "get_non_tensor_data"),
    *names("verl.utils.transferqueue_utils", "tqbridge"),
)
