"""What a user is told of the host memory of slices before a run."""

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.spec.composed import getter

SLICES = plugins.features(plugins.load())["interstage"]
KEYS = {
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-7B-Instruct",
    "actor_rollout_ref.actor.strategy": "fsdp",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": 2,
    "trainer.n_gpus_per_node": 8,
    "algorithm.adv_estimator": "grpo",
}
KL = {"actor_rollout_ref.actor.use_kl_loss": True}
PPO = {"algorithm.adv_estimator": "gae", "critic.model.path": "Qwen/Qwen2.5-1.5B"}


def told(**more: object) -> str:
    config = OmegaConf.create()
    for key, value in {**KEYS, **{key.replace("__", "."): value for key, value in more.items()}}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return SLICES.takes(getter(config)) or ""


@pytest.mark.parametrize(
    ("more", "said"),
    [
        # 7.616e9 parameters x 4 bytes x 4 replicas.
        ({}, "4 replicas keep copies of actor, 4 bytes a parameter (2 with strategy=fsdp2): at least 122 GB;"),
        (KL, "copies of actor and reference, 4 bytes a parameter (2 with strategy=fsdp2): at least 244 GB;"),
        ({**KL, "actor_rollout_ref.actor.strategy": "fsdp2"}, "reference, 2 bytes a parameter: at least 122 GB;"),
        ({**KL, "actor_rollout_ref.model.lora_rank": 8}, "copies of actor, 4 bytes a parameter"),
        ({**KL, "algorithm.rollout_correction.bypass_mode": True}, "copies of reference, 4 bytes"),
        # 1.544e9 more.
        (PPO, "copies of actor and critic, 4 bytes a parameter (2 with strategy=fsdp2): at least 147 GB;"),
        ({**PPO, "critic.model.path": "mine"}, "(2 with strategy=fsdp2) (with 7 billion each 224 GB); counted"),
        ({"actor_rollout_ref.rollout.tensor_model_parallel_size": 16}, "on each node a replica keeps a copy of actor"),
    ],
)
def test_the_host_memory_of_a_node_follows_from_models_replicas_and_engine(more: dict[str, object], said: str):
    assert said in told(**more)
