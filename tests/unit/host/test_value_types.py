"""Numbers and truth values of verl's configuration: the recipe ppo-cpu, composed as verl composes it, with one value of
another type."""

from copy import deepcopy

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli.composition import compose
from verl_fuse.cli.recipes import all_recipes, find_recipe
from verl_fuse.errors import FuseError
from verl_fuse.host.start.settings import load_settings
from verl_fuse.host.start.value_types import COUNTS, NEVER_NULL, type_refusals

pytest.importorskip("hydra")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TRUTH = "needs true or false (verl takes this for true)"


@pytest.fixture(scope="module")
def composed():
    return compose(find_recipe("ppo-cpu"), [])


@pytest.fixture
def refused(composed):
    """Return the refusals with these values, as text."""

    def refused(values: dict[str, object]) -> list[str]:
        config = deepcopy(composed)
        for key, value in values.items():
            OmegaConf.update(config, key, value, force_add=True)
        return list(map(str, type_refusals(config)))

    return refused


@pytest.mark.parametrize("recipe", [recipe.name for recipe in all_recipes()])
def test_every_recipe_has_values_of_the_right_types(recipe):
    assert list(type_refusals(compose(find_recipe(recipe), []))) == []


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        # The default in verl's YAML says the type, or is null.
        ("trainer.total_training_steps", "abc", "trainer.total_training_steps='abc': needs a number"),
        ("trainer.total_training_steps", "4", "trainer.total_training_steps='4': needs a number"),
        ("trainer.total_training_steps", [4], "trainer.total_training_steps=[4]: needs a number"),
        ("trainer.save_freq", "often", "trainer.save_freq='often': needs a number"),
        ("trainer.save_freq", None, "trainer.save_freq=null: needs a number"),
        ("trainer.val_before_train", "flase", f"trainer.val_before_train='flase': {TRUTH}"),
        ("trainer.val_before_train", "no", f"trainer.val_before_train='no': {TRUTH}"),
        ("trainer.nnodes", 1.0, "trainer.nnodes=1.0: needs a whole number"),
        ("data.train_batch_size", 16.0, "data.train_batch_size=16.0: needs a whole number"),
        ("data.seed", "abc", "data.seed='abc': needs a number"),
        # verl's dataclass says it, through re-exports, base classes and unions.
        ("algorithm.gamma", [1], "algorithm.gamma=[1]: needs a number"),
        ("algorithm.use_kl_in_reward", "flase", f"algorithm.use_kl_in_reward='flase': {TRUTH}"),
        ("algorithm.kl_ctrl.kl_coef", "small", "algorithm.kl_ctrl.kl_coef='small': needs a number"),
        (f"{ACTOR}.ppo_epochs", "abc", f"{ACTOR}.ppo_epochs='abc': needs a number"),
        (f"{ACTOR}.grad_clip", {"max": 1}, f"{ACTOR}.grad_clip={{'max': 1}}: needs a number"),
        (f"{ACTOR}.optim.lr", "fast", f"{ACTOR}.optim.lr='fast': needs a number"),
        (f"{ACTOR}.loss_scale_factor", "abc", f"{ACTOR}.loss_scale_factor='abc': needs a number"),
        (f"{ROLLOUT}.n", "two", f"{ROLLOUT}.n='two': needs a whole number"),
        (f"{ROLLOUT}.max_model_len", "abc", f"{ROLLOUT}.max_model_len='abc': needs a number"),
        ("critic.enable", "maybe", f"critic.enable='maybe': {TRUTH}"),
        ("trainer.val_before_train", "off", f"trainer.val_before_train='off': {TRUTH}"),
        ("trainer.total_training_steps", "", "trainer.total_training_steps='': needs a number"),
    ],
)
def test_a_value_of_another_type_is_refused(refused, key, value, says):
    assert refused({key: value}) == [says]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.total_training_steps", None),
        ("trainer.total_training_steps", 4.0),
        ("trainer.val_before_train", 0),
        ("trainer.val_before_train", "yes"),
        ("trainer.max_actor_ckpt_to_keep", None),
        ("trainer.nnodes", True),
        ("trainer.experiment_name", 5),
        ("trainer.logger", "console"),
        ("data.seed", 0),
        ("data.train_files", ["a.parquet"]),
        ("algorithm.gamma", 1),
        ("algorithm.kl_ctrl.kl_coef", "0.001"),
        ("algorithm.kl_ctrl.horizon", 1e4),
        (f"{ACTOR}.clip_ratio_low", None),
        (f"{ACTOR}.optim.betas", [0.9, 0.95]),
        (f"{ACTOR}.optim.lr", 1),
        (f"{ACTOR}.loss_agg_mode", "token-mean"),
        (f"{ROLLOUT}.enable_chunked_prefill", 1),
        ("trainer.v1.sampler.max_off_policy_threshold", None),
        # A variable that a script leaves unset.
        (f"{ACTOR}.use_kl_loss", ""),
        (f"{ROLLOUT}.multi_turn.enable", ""),
        ("data.gen_batch_size", ""),
        ("data.val_batch_size", ""),
        # verl sets it itself.
        (f"{ACTOR}.optim.total_training_steps", "None"),
        # What no class of verl's describes.
        (f"{ROLLOUT}.engine_kwargs.vllm.max_num_seqs", "abc"),
        ("algorithm._target_", "acme.config.Algorithm"),
        # Not known before the run.
        ("trainer.n_gpus_per_node", "${oc.env:NOWHERE_SET}"),
        # Of what this run lacks.
        ("trainer.v1.separate_async.parameter_sync_step", "abc"),
        ("reward.reward_model.nnodes", "abc"),
        ("algorithm.filter_groups.max_num_gen_batches", "abc"),
    ],
)
def test_what_verl_takes_is_not_refused(refused, key, value):
    assert refused({key: value}) == []


def test_models_that_the_run_lacks_may_have_any_value(refused):
    wrong = {"critic.ppo_epochs": "abc", "actor_rollout_ref.ref.fsdp_config.fsdp_size": "abc"}
    assert len(refused(wrong)) == 2
    assert refused(wrong | {"critic.enable": False, "algorithm.use_kl_in_reward": False}) == []


def test_a_run_that_only_validates_has_no_numbers_of_steps(refused):
    null = {"trainer.save_freq": None, "trainer.critic_warmup": None}
    assert len(refused(null)) == 2
    assert refused(null | {"trainer.val_only": True}) == []
    assert len(refused({"trainer.total_epochs": None, "trainer.val_only": True})) == 1


def test_the_trainer_before_v1_has_types_of_its_own(refused):
    assert refused({"trainer.total_training_steps": "abc", "trainer.use_v1": False}) == []


@pytest.mark.parametrize("key", sorted(NEVER_NULL))
def test_numbers_that_verl_computes_with_are_not_null(refused, key):
    assert [text.partition(":")[0] for text in refused({key: None})] == [f"{key}=null"]
    assert refused({key: 1}) == []


@pytest.mark.parametrize("key", sorted(COUNTS))
def test_counts_are_whole(refused, key):
    assert refused({key: 2.0})[0] == f"{key}=2.0: needs a whole number"


def test_a_reference_to_a_bad_value_is_not_refused_again(refused):
    assert refused({"data.max_response_length": "abc"}) == ["data.max_response_length='abc': needs a number"]


def test_a_bad_value_is_told_with_those_of_fuse_and_keeps_other_checks_from_computing_with_it(composed):
    config = deepcopy(composed)
    config.trainer.n_gpus_per_node = "two"
    config.fuse.poll_interval = 0
    config.fuse.preset = "fast"
    with pytest.raises(FuseError) as error:
        load_settings(config)
    assert error.value.args == (
        "fuse.poll_interval=0.0: needs >= 0.001 and <= 60.0",
        "trainer.n_gpus_per_node='two': needs a whole number",
    )
