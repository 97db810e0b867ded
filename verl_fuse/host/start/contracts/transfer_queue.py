"""Declares contracts on TransferQueue, and on the keys, tags and fields that verl's agent loop writes there (rows.py,
completeness.py, samples.py, accounting.py)."""

from verl_fuse.spec.contract import Attribute, Class, Contract, names

BATCH_META = "transfer_queue:KVBatchMeta"
AGENT_LOOP = "verl.trainer.ppo.v1.agent_loop_tq"

CONTRACTS: tuple[Contract, ...] = (
    # The function returns the fields that all rows have.
    *names("transfer_queue", "kv_batch_get kv_list"),
    Class(BATCH_META, required=()),
    *names(BATCH_META, "keys tags partition_id extra_info __post_init__ __len__"),
    # The keys {uid}_{session}_{index}, the tags, and the states of prompt groups.
    *names(f"{AGENT_LOOP}:AgentLoopWorkerTQ", "_run_prompt"),
    # The log of errors of agent loops (rollout/agent_errors.py).
    Attribute(f"{AGENT_LOOP}:logger", "logging.getLogger(__name__)"),
    # Where an agent loop is built, through the module's name `hydra` (rollout/agents.py).
    *names("verl.experimental.agent_loop.agent_loop:AgentLoopWorker", "_run_agent_loop"),
    *names(f"{AGENT_LOOP}:AgentLoopWorkerTQ", "_agent_loop_postprocess"),
)
