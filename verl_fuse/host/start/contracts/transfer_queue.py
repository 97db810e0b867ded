"""Declares contracts on TransferQueue, and on the keys, tags and fields that verl's agent loop writes there (rows.py,
completeness.py, samples.py, accounting.py)."""

from verl_fuse.spec.contract import Attribute, Class, Contract, Function

BATCH_META = "transfer_queue:KVBatchMeta"
AGENT_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"

CONTRACTS: tuple[Contract, ...] = (
    # The function returns the fields that all rows have.
    Function("transfer_queue:kv_batch_get", "(keys, partition_id, select_fields=None)", "fd73b103f6e791f1"),
    Function("transfer_queue:kv_list", "(partition_id=None)", "05832061eb773923"),
    Class(BATCH_META, required=()),
    Attribute(f"{BATCH_META}.keys"),
    Attribute(f"{BATCH_META}.tags"),
    Attribute(f"{BATCH_META}.partition_id"),
    Attribute(f"{BATCH_META}.extra_info"),
    Function(f"{BATCH_META}.__post_init__", "(self)", "02c369ac3926ab4d"),
    Function(f"{BATCH_META}.__len__", "(self)", "b74f2b5ed4756e3f"),
    # The keys {uid}_{session}_{index}, the tags, and the states of prompt groups.
    Function(
        f"{AGENT_LOOP}:AgentLoopWorkerTQ._run_prompt",
        "async (self, prompt, sampling_params, trajectory, trace=False)",
        "1232746e27f5817e",
    ),
    # The log of errors of agent loops (rollout/agent_errors.py).
    Attribute(f"{AGENT_LOOP}:logger", "logging.getLogger(__name__)"),
    # Where an agent loop is built, through the module's name `hydra` (rollout/agents.py).
    Function(
        "verl.experimental.agent_loop.agent_loop:AgentLoopWorker._run_agent_loop",
        "async (self, sampling_params, trajectory, *, agent_name, trace=True, **kwargs)",
        "5cd5cee66a1c5bd0",
    ),
    Function(
        f"{AGENT_LOOP}:AgentLoopWorkerTQ._agent_loop_postprocess",
        "async (self, output, validate, **kwargs)",
        "0acd529ff1307e54",
    ),
)
