"""Which stages a finished sample goes through, and the multiple that each of them needs, by the keys of verl."""

import warnings

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from verl_fuse.host.inference.stages import micro_batch, streamed_stages

CONFIG = {
    "algorithm": {"rollout_correction": {"bypass_mode": False}},
    "actor_rollout_ref": {
        "rollout": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 3},
        "ref": {"log_prob_use_dynamic_bsz": False, "log_prob_micro_batch_size_per_gpu": 5},
    },
}


def config_of(**changes):
    config = OmegaConf.create(CONFIG)
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


@pytest.mark.parametrize(
    ("stage", "ref_in_actor", "size"),
    [("old_log_prob", False, 3), ("old_log_prob", True, 3), ("ref", False, 5), ("ref", True, 3)],
)
def test_a_reference_that_is_the_actor_has_the_actor_s_micro_batch(stage, ref_in_actor, size):
    assert micro_batch(config_of(), stage, ref_in_actor) == size


@pytest.mark.parametrize(("ref_in_actor", "block", "other"), [(False, "ref", "rollout"), (True, "rollout", "ref")])
def test_any_number_of_samples_will_do_where_sizes_are_dynamic_or_not_set(ref_in_actor, block, other):
    for key, value in (("log_prob_use_dynamic_bsz", True), ("log_prob_micro_batch_size_per_gpu", None)):
        dynamic = config_of(**{f"actor_rollout_ref__{block}__{key}": value})
        assert micro_batch(dynamic, "ref", ref_in_actor) == 1
        assert micro_batch(config_of(**{f"actor_rollout_ref__{other}__{key}": value}), "ref", ref_in_actor) > 1


@pytest.mark.parametrize(
    ("reference", "critic", "changes", "stages"),
    [
        (True, True, {}, ("old_log_prob", "ref", "values")),
        (False, True, {}, ("old_log_prob", "values")),
        (True, False, {}, ("old_log_prob", "ref")),
        (True, True, {"algorithm__rollout_correction__bypass_mode": True}, ("ref", "values")),
        (True, True, {"algorithm__rollout_correction": None}, ("old_log_prob", "ref", "values")),
        (True, True, {"fuse__update__skip_old_log_prob": True}, ("ref", "values")),
        (True, True, {"fuse__update__skip_values": True}, ("old_log_prob", "ref")),
        (True, True, {"fuse__placement__critic": {"first": 1, "devices": 1}}, ("old_log_prob", "ref")),
    ],
)
def test_what_is_computed_elsewhere_or_not_at_all_is_no_stage(reference, critic, changes, stages):
    assert streamed_stages(config_of(**changes), reference, critic) == stages
