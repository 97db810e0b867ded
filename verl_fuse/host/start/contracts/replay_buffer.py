"""Declares contracts on the replay buffer whose polls we watch (rollout/watch.py)."""

from verl_fuse.host.upstream.targets import PPO_YAML
from verl_fuse.spec.contract import Contract, config_keys, names

REPLAY_BUFFER = "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer"

CONTRACTS: tuple[Contract, ...] = (
    # Its poll interval of 2 s (spec/step.py) is the slowest pace we take.
    *names(REPLAY_BUFFER, "__init__"),
    *names(REPLAY_BUFFER, "_wait_for_next_poll", closed=True),
    # Discards groups of a running step, and asks for other groups: dynamic sampling, failed groups.
    *names(REPLAY_BUFFER, "_clear_groups", closed=True),
    *names(REPLAY_BUFFER, "_sync_metadata_from_transfer_queue sample"),
    # A user's own sampler must be a ReplayBuffer; the error names it where it is not.
    *config_keys(PPO_YAML, "trainer.v1.sampler.custom_sampler.name:any trainer.v1.sampler.custom_sampler.path:any"),
    *names(REPLAY_BUFFER, "poll_interval partitions pending_keys running_keys finished_keys failure_keys"),
    # What dynamic sampling found of each group (rollout/discards.py): the value that its samples share, or None.
    *names(REPLAY_BUFFER, "_dapo_filtered_keys _dapo_classification_cache filter_groups_metric train_batch_size"),
)
