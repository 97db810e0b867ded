"""Declares contracts on the replay buffer whose polls we watch (rollout/watch.py)."""

from verl_fuse.host.upstream.targets import PPO_YAML
from verl_fuse.spec.contract import Attribute, ConfigKey, Contract, Function

REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

CONTRACTS: tuple[Contract, ...] = (
    # Its poll interval of 2 s (spec/step.py) is the slowest pace we take.
    Function(
        f"{REPLAY_BUFFER}.__init__",
        "(self, trainer_mode, trainer_config, max_off_policy_threshold, max_off_policy_strategy, sampler_kwargs, "
        "poll_interval=2.0, refill_fn=None, filter_groups_metric=None, train_batch_size=None, gen_batch_size=None, "
        "max_inflight_gen_batches=1, sync_refill_failed_groups=False)",
        "665060e54d941a62",
    ),
    Function(
        f"{REPLAY_BUFFER}._wait_for_next_poll", "(self, partition_id, last_debug_time)", "45374174750354ae", closed=True
    ),
    # Discards groups of a running step, and asks for other groups: dynamic sampling, failed groups.
    Function(f"{REPLAY_BUFFER}._clear_groups", "(self, partition_id, uids)", "bec187986d07dba8", closed=True),
    Function(f"{REPLAY_BUFFER}._sync_metadata_from_transfer_queue", "(self)", "69f0ff63e4fd8199"),
    Function(f"{REPLAY_BUFFER}.sample", "(self, global_steps, partition_id, batch_size)", "fc03274aefd56807"),
    # A user's own sampler must be a ReplayBuffer; the error names it where it is not.
    ConfigKey(PPO_YAML, "trainer.v1.sampler.custom_sampler.name", object),
    ConfigKey(PPO_YAML, "trainer.v1.sampler.custom_sampler.path", object),
    Attribute(f"{REPLAY_BUFFER}.poll_interval"),
    Attribute(f"{REPLAY_BUFFER}.partitions"),
    Attribute(f"{REPLAY_BUFFER}.pending_keys"),
    Attribute(f"{REPLAY_BUFFER}.running_keys"),
    Attribute(f"{REPLAY_BUFFER}.finished_keys"),
    Attribute(f"{REPLAY_BUFFER}.failure_keys"),
    # What dynamic sampling found of each group (rollout/discards.py): the value that its samples share, or None.
    Function(f"{REPLAY_BUFFER}._dapo_filtered_keys", "(self, partition_id)", "0cdd4b3536ce8c3d"),
    Attribute(f"{REPLAY_BUFFER}._dapo_classification_cache"),
    Attribute(f"{REPLAY_BUFFER}.filter_groups_metric"),
    Attribute(f"{REPLAY_BUFFER}.train_batch_size"),
)
