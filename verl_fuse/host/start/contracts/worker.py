"""Declares contracts on the worker classes we subclass and the methods we wrap: their dispatch by Ray decides the calls
that a lane may make (worker.py, lane.py)."""

from verl_fuse.host.upstream.targets import ENGINE_WORKERS
from verl_fuse.spec.contract import Class, Contract, Decorator, Function

DECORATOR = "verl.single_controller.base.decorator"

CONTRACTS: tuple[Contract, ...] = (
    Class(f"{ENGINE_WORKERS}:ActorRolloutRefWorker", ("Worker",)),
    Class(f"{ENGINE_WORKERS}:TrainingWorker", ("Worker",)),
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_log_prob", "(self, data)", "d13b1faf470b8ee5", closed=True
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_log_prob",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='actor'))",
    ),
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_ref_log_prob", "(self, data)", "a3fba383f9646a57", closed=True
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.compute_ref_log_prob",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='ref'))",
    ),
    Function(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_actor", "(self, data)", "a0342ca79cd1fe4b", closed=True),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_actor",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='actor'))",
    ),
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_weights",
        "async (self, global_steps=None, mode='auto')",
        "c39093d5e3fd9621",
        closed=True,
    ),
    Decorator(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.update_weights",
        "register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)",
    ),
    Function(
        f"{ENGINE_WORKERS}:ActorRolloutRefWorker.save_checkpoint",
        "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
        "7a44f11a2f8159d0",
        closed=True,
    ),
    Decorator(f"{ENGINE_WORKERS}:ActorRolloutRefWorker.save_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    Function(f"{ENGINE_WORKERS}:TrainingWorker.infer_batch", "(self, data)", "6da40d036e75211a", closed=True),
    Decorator(
        f"{ENGINE_WORKERS}:TrainingWorker.infer_batch",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='train'), blocking=False)",
    ),
    Function(f"{ENGINE_WORKERS}:TrainingWorker.train_mini_batch", "(self, data)", "8a039f36db8256f8", closed=True),
    Decorator(
        f"{ENGINE_WORKERS}:TrainingWorker.train_mini_batch",
        "register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name='train'), blocking=False)",
    ),
    Function(
        f"{ENGINE_WORKERS}:TrainingWorker.save_checkpoint",
        "(self, local_path, hdfs_path=None, global_step=0, max_ckpt_to_keep=None)",
        "3a9f5adba075f5dd",
        closed=True,
    ),
    Decorator(f"{ENGINE_WORKERS}:TrainingWorker.save_checkpoint", "register(dispatch_mode=Dispatch.ONE_TO_ALL)"),
    # Our wrappers keep the attributes that it sets on a method.
    Function(
        f"{DECORATOR}:register",
        "(dispatch_mode=Dispatch.ALL_TO_ALL, execute_mode=Execute.ALL, blocking=True, materialize_futures=True)",
        "9a8638b9e642b8ac",
    ),
    Function(f"{DECORATOR}:make_nd_compute_dataproto_dispatch_fn", "(mesh_name)", "6f8d458d5d3dcbe2"),
    Function("verl.single_controller.base.worker:Worker.rank", "property (self)"),
    # The path of an update through a mini-batch, parts of which update/megatron and update/lean change.
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngine.forward_backward_batch",
        "(self, data, loss_function, forward_only=False)",
        "da9707df5fce7407",
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead.forward_step",
        "(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        "8df7dc2f7b30ba5d",
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithValueHead.forward_step",
        "(self, batch_iter, model, logits_processor_func, postprocess_micro_batch_func)",
        "05c230526f9ff2e9",
    ),
    Function(
        "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead.postprocess_micro_batch_func",
        "(self, output, data, forward_only, loss_function, local_cp_size=None)",
        "1d4ef4ecfaf0e336",
    ),
    Function(f"{ENGINE_WORKERS}:TrainingWorker.train_batch", "(self, data)", "92d0f344d1d4c11c", closed=True),
    Function("verl.workers.engine.base:BaseEngine.train_batch", "(self, data, loss_function)", "9b4325972cede6ec"),
    Function("verl.utils.tensordict_utils:get_non_tensor_data", "(data, key, default)", "6e8619fa3e304de8"),
    Function("verl.utils.transferqueue_utils:tqbridge", "(dispatch_mode=None)", "acb0bfd4ed7630a0"),
)
