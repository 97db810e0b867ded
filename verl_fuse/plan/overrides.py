"""Writes a plan as keys of verl 0.9.1's configuration.

Invariants (tests/integration/test_plan_overrides.py):
- every other key exists in verl's own configuration, and verl's checks accept the values, for PPO and GRPO on FSDP and
  Megatron;
- a key that verl reads but its YAML lacks begins with ++, as on Hydra's command line;
- roles that verl ties together get the same values; interpolated keys are named themselves, because a plan is applied
  after they are resolved.
"""

import math
from collections.abc import Mapping, Sequence

from verl_fuse.cost.memory import GPU_BUFFERS
from verl_fuse.plan.call_configs import LEFT_BUFFERS
from verl_fuse.plan.generation import MOST_RUNNING
from verl_fuse.plan.space import CallConfig
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.composed import ACTOR, REFERENCE, ROLLOUT
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model
from verl_fuse.spec.plan import Plan, Setting
from verl_fuse.spec.workload import Call, Kl, Workload

REWARD_BLOCK = "reward.reward_model"
KL_KEYS: Mapping[Kl, str] = {"loss": f"{ACTOR}.use_kl_loss", "reward": "algorithm.use_kl_in_reward"}
# A rollout engine may take at most this share of a device's memory.
FULLEST = 0.95

Chosen = Mapping[str, tuple[Call, Mesh, CallConfig]]
"""Call name -> call, mesh and configuration."""


def placement_overrides(workload: Workload, cluster: Cluster, strategy: str, chosen: Chosen) -> dict[str, Setting]:
    """Return the keys that place the calls and size their micro-batches; the models and data to train on are the
    workload's."""
    _, main, train = chosen["actor_train"]
    engine = _megatron if strategy == "megatron" else _fsdp
    tokens = _tokens(workload, train, workload.minibatches)
    # The reference has a block of its own even where no call uses it; verl builds it from the actor's layout.
    reference = chosen["reference_infer"][2] if "reference_infer" in chosen else train
    found: dict[str, Setting] = {
        **_pool("trainer", main, cluster),
        **_rollout(workload, cluster, chosen),
        **engine(ACTOR, "fsdp_config", train, True),
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        f"{ROLLOUT}.log_prob_use_dynamic_bsz": True,
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu": (
            _tokens(workload, chosen["actor_infer"][2], 1) if "actor_infer" in chosen else tokens
        ),
        **engine(REFERENCE, "fsdp_config", reference, False),
        f"{REFERENCE}.log_prob_use_dynamic_bsz": True,
        f"{REFERENCE}.log_prob_max_token_len_per_gpu": _tokens(workload, reference, 1),
    }
    if "critic_train" in chosen:
        critic = chosen["critic_train"][2]
        # verl trains the critic with the budget of its inference (trainer_base.py, _setup): the smaller one is safe for
        # both.
        tokens = min(_tokens(workload, critic, workload.minibatches), _tokens(workload, chosen["critic_infer"][2], 1))
        found |= {
            **engine("critic", "fsdp", critic, True),
            "critic.use_dynamic_bsz": True,
            "critic.ppo_max_token_len_per_gpu": tokens,
            "critic.forward_max_token_len_per_gpu": tokens,
            # verl's YAML leaves this one to its dataclass.
            "++critic.ppo_infer_max_token_len_per_gpu": tokens,
        }
    if "reward_infer" in chosen:
        _, mesh, config = chosen["reward_infer"]
        found |= {
            f"{REWARD_BLOCK}.enable": True,
            f"{REWARD_BLOCK}.enable_resource_pool": mesh != main,
            **(_pool(REWARD_BLOCK, mesh, cluster) if mesh != main else {}),
            f"{REWARD_BLOCK}.rollout.tensor_model_parallel_size": config.layout.tp,
        }
    return found


def workload_overrides(workload: Workload) -> dict[str, Setting]:
    """Return the keys that make verl train the plan's workload; `path_overrides` leaves the paths of models and data
    open."""
    found: dict[str, Setting] = {
        "algorithm.adv_estimator": "gae" if workload.algorithm == "ppo" else "grpo",
        "data.train_batch_size": workload.prompts,
        "data.max_prompt_length": workload.prompt.maximum,
        "data.max_response_length": workload.response.maximum,
        f"{ROLLOUT}.n": workload.samples,
        f"{ACTOR}.ppo_mini_batch_size": workload.prompts_per_update,
        f"{ACTOR}.ppo_epochs": workload.epochs,
    }
    if workload.critic is not None:
        found |= {"critic.ppo_mini_batch_size": workload.prompts_per_update, "critic.ppo_epochs": workload.epochs}
    if workload.kl_term is not None:
        found[KL_KEYS[workload.kl_term]] = True
    if not workload.old_log_prob:
        found["algorithm.rollout_correction.bypass_mode"] = True
    return found


def path_overrides(workload: Workload) -> dict[str, Setting]:
    """Return what verl needs beside a plan: a rollout engine, and placeholders for the paths of models and data."""

    def model(of: Model) -> str:
        return f"/path/to/{of.name}"

    found: dict[str, Setting] = {"actor_rollout_ref.model.path": model(workload.actor), f"{ROLLOUT}.name": "vllm"}
    if workload.critic is not None:
        found["critic.model.path"] = model(workload.critic)
    if workload.reward is not None:
        found |= {f"{REWARD_BLOCK}.model_path": model(workload.reward), f"{REWARD_BLOCK}.rollout.name": "vllm"}
    return {**found, "data.train_files": "/path/to/train.parquet", "data.val_files": "/path/to/validation.parquet"}


def feature_overrides(plan: Plan) -> dict[str, Setting]:
    """Return the keys that switch on the features that the plan counts on, and the keys that the plan sets under
    `fuse`. They are no part of the plan's own overrides: `fuse.plan` needs the features to be on, and sets the rest
    itself."""
    found: dict[str, Setting] = {f"fuse.{name}.enabled": True for name in plan.switches}
    if "interstage" in plan.features and plan.strategy == "fsdp":
        found["fuse.interstage.layout"] = "slices"
    return found | {f"fuse.{key}": _written(value) for key, value in plan.settings.items()}


def _written(value: Setting | Mapping[str, int]) -> Setting:
    """Return a value as Hydra's command line takes it."""
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{number}" for key, number in value.items()) + "}"
    return value


def command_line(strategy: str, overrides: Mapping[str, Setting]) -> Sequence[str]:
    """Return the arguments for verl's `main_ppo` or `verl-fuse run`."""
    engine = ["model_engine=megatron"] if strategy == "megatron" else []
    fuse = ["+fuse=default", "trainer.v1.trainer_mode=fuse"]
    return [*engine, *fuse, *(f"{key}={_text(value)}" for key, value in overrides.items())]


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pool(where: str, mesh: Mesh, cluster: Cluster) -> dict[str, Setting]:
    per_node = min(mesh.size, cluster.devices_per_node)
    return {f"{where}.nnodes": mesh.size // per_node, f"{where}.n_gpus_per_node": per_node}


def _rollout(workload: Workload, cluster: Cluster, chosen: Chosen) -> dict[str, Setting]:
    _, mesh, config = chosen["actor_generate"]
    left = 0.0 if cluster.device.is_cpu else float(LEFT_BUFFERS * GPU_BUFFERS)
    memory = cluster.device.memory
    needed = config.active + config.copy
    free = memory - needed - sum(other.resident for _, where, other in chosen.values() if where.overlaps(mesh))
    if "critic_train" in chosen and not (critic := chosen["critic_train"][1]).overlaps(mesh):
        # Replicas are parked there, whose memory the critic's update is planned beside.
        here = [other for _, where, other in chosen.values() if where.overlaps(critic)]
        free = min(free, memory - sum(other.resident for other in here) - chosen["critic_train"][2].active)
    # A larger KV cache than needed keeps more prefixes; half of the free memory stays free, for fragmentation.
    share = (needed - left + max(0.0, free) / 2) / memory
    return {
        f"{ROLLOUT}.tensor_model_parallel_size": config.layout.tp,
        f"{ROLLOUT}.gpu_memory_utilization": min(FULLEST, math.ceil(100 * share) / 100),
        f"{ROLLOUT}.max_num_seqs": min(MOST_RUNNING, -(-workload.sequences // config.layout.dp)),
    }


def _tokens(workload: Workload, config: CallConfig, updates: int) -> int:
    """Return the tokens per device of one micro-batch; at least one whole sequence."""
    layout = config.layout
    mean = workload.prompt.mean + workload.response.mean
    each = workload.sequences * mean / (updates * layout.dp * config.microbatches)
    longest = workload.prompt.maximum + workload.response.maximum
    return math.ceil(max(each, longest) / layout.cp)


def _fsdp(role: str, block: str, config: CallConfig, trains: bool) -> dict[str, Setting]:
    layout = config.layout
    return {
        f"{role}.ulysses_sequence_parallel_size": layout.cp,
        f"{role}.{block}.ulysses_sequence_parallel_size": layout.cp,
        f"{role}.{block}.fsdp_size": -1 if layout.shards == layout.devices else layout.shards,
        f"{role}.{block}.param_offload": config.offload,
        **({f"{role}.{block}.optimizer_offload": config.offload} if trains else {}),
    }


def _megatron(role: str, block: str, config: CallConfig, trains: bool) -> dict[str, Setting]:
    layout: Layout = config.layout
    found: dict[str, Setting] = {
        f"{role}.megatron.tensor_model_parallel_size": layout.tp,
        f"{role}.megatron.pipeline_model_parallel_size": layout.pp,
        f"{role}.megatron.context_parallel_size": layout.cp,
        f"{role}.megatron.expert_model_parallel_size": layout.ep,
        f"{role}.megatron.param_offload": config.offload,
    }
    if layout.etp:
        found[f"{role}.megatron.expert_tensor_parallel_size"] = layout.etp
    if trains:
        found |= {
            f"{role}.megatron.sequence_parallel": layout.tp > 1,
            f"{role}.megatron.use_distributed_optimizer": True,
            f"{role}.megatron.optimizer_offload": config.offload,
            # The cost model assumes this of training.
            f"{role}.megatron.override_transformer_config.recompute_granularity": "full",
            f"{role}.megatron.override_transformer_config.recompute_method": "uniform",
            f"{role}.megatron.override_transformer_config.recompute_num_layers": 1,
        }
    return found
