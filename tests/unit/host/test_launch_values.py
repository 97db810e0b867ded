"""Values with which verl's workers, or its first update, would end."""

import pytest
from omegaconf import OmegaConf

from verl_fuse.host.start.launch_values import value_refusals

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
GOOD = {
    "trainer.nnodes": 1,
    "trainer.n_gpus_per_node": 8,
    "data.train_batch_size": 64,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    f"{ROLLOUT}.n": 1,
    f"{ROLLOUT}.mode": "async",
    f"{ROLLOUT}.tensor_model_parallel_size": 2,
    f"{ROLLOUT}.data_parallel_size": 1,
    f"{ROLLOUT}.pipeline_model_parallel_size": 1,
    f"{ACTOR}.use_kl_loss": True,
    f"{ACTOR}.kl_loss_type": "low_var_kl",
    "algorithm.use_kl_in_reward": False,
    "algorithm.kl_penalty": "kl",
}


def refused(changes: dict[str, object]) -> list[str]:
    config = OmegaConf.create()
    for key, value in {**GOOD, **changes}.items():
        OmegaConf.update(config, key, value, force_add=True)
    return list(map(str, value_refusals(config)))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {f"{ROLLOUT}.tensor_model_parallel_size": 8},
        {f"{ROLLOUT}.data_parallel_size": 4},
        {"trainer.nnodes": 3, f"{ROLLOUT}.tensor_model_parallel_size": 3},
        {f"{ACTOR}.kl_loss_type": "k3+"},
        {f"{ACTOR}.use_kl_loss": False, f"{ACTOR}.kl_loss_type": "lowvar_kl"},
        {"algorithm.kl_penalty": "full"},
        {"trainer.use_v1": False, "trainer.nnodes": 0},
        {"trainer.nnodes": None},
    ],
)
def test_what_verl_runs_is_accepted(changes: dict[str, object]):
    assert refused(changes) == []


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        *((key, 0, "needs a whole number >= 1") for key in [*GOOD][:6]),
        ("data.max_response_length", -5, "needs a whole number >= 1"),
        (f"{ROLLOUT}.tensor_model_parallel_size", 3, "a replica has 3 devices: needs a divisor of the run's 8"),
        (f"{ROLLOUT}.tensor_model_parallel_size", 16, "a replica has 16 devices: needs a divisor of the run's 8"),
        (f"{ROLLOUT}.mode", "sync", "verl 0.9.1 has no such mode any more; allowed: async"),
        (f"{ACTOR}.kl_loss_type", "lowvar_kl", "verl has no such estimator (did you mean 'low_var_kl'?); allowed: kl,"),
    ],
)
def test_what_ends_verl_is_refused(key: str, value: object, said: str):
    (one,) = refused({key: value})
    assert one.startswith(f"{key}=")
    assert said in one


def test_the_estimator_of_the_reward_counts_where_the_reward_has_it():
    (one,) = refused({"algorithm.use_kl_in_reward": True, "algorithm.kl_penalty": "full"})
    assert one.startswith("algorithm.kl_penalty='full': verl has no such estimator")


def test_the_estimators_are_those_of_verl():
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    import torch

    from verl_fuse.host.start.launch_values import _KL

    one = torch.zeros(1)
    for name in _KL:
        core.kl_penalty(one, one, f"{name}+")
    with pytest.raises(NotImplementedError):
        core.kl_penalty(one, one, "full")
