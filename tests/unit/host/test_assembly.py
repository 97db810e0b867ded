"""The parts of a trainer get the sizes, devices and limits of their own model: worker groups of different sizes, a
critic with other micro-batches than the actor, devices of its own. No Ray, no engine."""

import warnings
from copy import deepcopy
from types import SimpleNamespace

import pytest
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from verl.trainer.ppo.utils import Role

    from verl_fuse.host import assembly
    from verl_fuse.host.inference.lane import Lane
    from verl_fuse.host.weights.exports import Export, joined
    from verl_fuse_interstage.slices import refresh
    from verl_fuse_placement import deferred
    from verl_fuse_update import parts
    from verl_fuse_update.stream import driver

SIZES = [
    "algorithm.adv_estimator=gae",
    "algorithm.use_kl_in_reward=true",
    "actor_rollout_ref.rollout.prompt_length=7",
    "actor_rollout_ref.rollout.response_length=9",
    "actor_rollout_ref.rollout.max_num_seqs=33",
]


def micro_batch(config, stage, ref_in_actor):
    """In place of what reads a model's configuration, which would look for the model."""
    return {"old_log_prob": 4, "ref": 4 if ref_in_actor else 5, "values": 6}[stage]


def group(**meshes):
    """A worker group that cuts a batch over so many ranks by mesh."""
    return SimpleNamespace(_dispatch_info={mesh: list(range(size)) for mesh, size in meshes.items()}, world_size=8)


@pytest.fixture(scope="module")
def composed():
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", SIZES)


@pytest.fixture
def trainer(composed, monkeypatch):
    for module in (assembly, deferred, refresh):
        monkeypatch.setattr(module, "micro_batch", micro_batch)
    config = deepcopy(composed)
    recorder = SimpleNamespace(add=lambda span: None)
    core = SimpleNamespace(call_timeout=11.0, replica_timeout=12.0, weight_sync_timeout=13.0)
    devices = {"critic": range(4, 8)}
    hook = SimpleNamespace(fuse_devices=lambda model, config: devices[model], fuse_worker_class=lambda **_: None)
    return SimpleNamespace(
        config=config,
        settings=SimpleNamespace(core=core, manager=SimpleNamespace(hook=hook)),
        journal=SimpleNamespace(recorder=recorder),
        replicas=SimpleNamespace(devices_each=2),
        use_critic=True,
        use_reference_policy=True,
        ref_in_actor=False,
        actor_rollout_wg=group(actor=2),
        ref_policy_wg=group(ref=1),
        critic_wg=group(train=4),
        processor=None,
        role_worker_mapping={},
        director=SimpleNamespace(),
        run_stage="run",
        lane="lane",
        call=lambda stage, stock, batch, metrics: (stage, stock, batch, metrics),
        llm_server_manager="manager",
        checkpoint_manager="checkpoints",
        devices=devices,
    )


def groups_of(trainer):
    return {"actor": trainer.actor_rollout_wg, "critic": trainer.critic_wg}


STOCK = SimpleNamespace(_compute_old_log_prob="old", _compute_ref_log_prob="ref", _compute_values="values")


@pytest.mark.parametrize(("in_actor", "reference"), [(False, 1 * 5), (True, 2 * 4)])
def test_each_stage_has_the_ranks_and_the_micro_batches_of_its_model(trainer, in_actor, reference):
    trainer.ref_in_actor = in_actor
    found = assembly.sample_inference(trainer, STOCK)
    assert found._multiples == {"old_log_prob": 2 * 4, "ref": reference, "values": 4 * 6}
    assert found._dp_size == 4, "rows are spread over the ranks of the widest"
    # Each goes through the trainer's parts.
    assert {stage: call("batch", {}) for stage, call in found._calls.items()} == {
        stage: (stage, stock, "batch", {})
        for stage, stock in (("old_log_prob", "old"), ("ref", "ref"), ("values", "values"))
    }


def test_a_batch_of_a_slice_fits_the_micro_batches_of_all_models(trainer, monkeypatch):
    made = []
    monkeypatch.setattr(refresh, "Slices", lambda *args: made.append(args))
    pool = SimpleNamespace(get_resource_pool=lambda role: f"pool of {role.name}")
    workers = {str(Role.Critic): SimpleNamespace(kwargs={"config": "the critic's"})}
    trainer.resource_pool_manager, trainer.resource_pool_to_cls = pool, {"pool of Critic": workers}
    trainer.role_worker_mapping = {Role.ActorRollout: None, Role.Critic: None}
    trainer.llm_server_manager = SimpleNamespace(get_replicas=lambda: [SimpleNamespace(world_size=2)])
    trainer.processor = "an image processor"
    refresh._built(trainer, ("old_log_prob", "ref", "values"))
    ((setup, of, size, _, timeout),) = made
    assert (setup.micro_batch, setup.critic, setup.multimodal) == (60, "the critic's", True)
    assert (of, size, timeout) == ("pool of ActorRollout", 2, 11.0)


def test_replicas_know_their_sequences_and_their_deadline(trainer, monkeypatch):
    made = []
    monkeypatch.setattr(assembly, "Replicas", lambda *args, **kwargs: made.append((args, kwargs)))
    assembly.build_replicas(trainer)
    (((manager, checkpoints, _, timeout), sizes),) = made
    assert (manager, checkpoints, timeout) == ("manager", "checkpoints", 12.0)
    assert sizes == {"max_num_seqs": 33, "sequence_tokens": 16}


@pytest.mark.parametrize(("processor", "more"), [(None, False), ("an image processor", True)])
def test_a_deferred_update_reads_images_where_there_are_any(trainer, processor, more):
    trainer.processor = processor
    part = deferred.deferred_critic(trainer, groups_of(trainer))
    try:
        assert ("multi_modal_inputs" in part._fields) is more
        assert part.lane._timeout == 11.0
    finally:
        part.close()


@pytest.mark.parametrize(("reference", "beside"), [(True, True), (False, False)])
def test_values_apart_wait_for_the_update_and_name_the_replicas_on_the_critic_s_devices(
    trainer, monkeypatch, reference, beside
):
    trainer.use_reference_policy = reference
    OmegaConf.update(
        trainer.config,
        "fuse",
        {"placement": {"critic": {"first": 4, "devices": 4}}, "update": {"skip_old_log_prob": True}},
        force_add=True,
    )
    part = SimpleNamespace(is_done=False)
    monkeypatch.setattr(deferred, "DeferredCritic", lambda *args: part)
    assert deferred.deferred_critic(trainer, groups_of(trainer)) is part
    found = trainer.director.apart
    assert found.views({0, 1, 2, 3}) == ()
    part.is_done = True
    assert [[view.released for view in found.views(freed)] for freed in ({2, 3}, {1, 2})] == [[True], [False]]
    assert (found.inference._multiples, found.inference._beside) == ({"values": 4 * 6}, beside)
    found.inference._lane.close()


@pytest.mark.parametrize(("own", "first"), [(range(4, 8), 4), (None, 0)])
def test_a_critic_s_ranks_have_the_numbers_of_their_devices(trainer, monkeypatch, own, first):
    trainer.devices["critic"] = own
    asked = []
    monkeypatch.setattr(assembly, "recording_worker_class", lambda *args: asked.append(args) or object)
    monkeypatch.setattr(assembly.ray, "remote", lambda made: made)
    remote = SimpleNamespace(__ray_actor_class__="stock")
    trainer.role_worker_mapping = {Role.ActorRollout: remote, Role.Critic: remote, Role.RefPolicy: remote}
    assert assembly.worker_classes(trainer).keys() == {Role.ActorRollout, Role.Critic}
    assert asked == [("actor", "stock", 0), ("critic", "stock", first)]


@pytest.mark.parametrize("slices", [True, False])
def test_streamed_updates_have_a_lane_for_each_replica_that_of_its_slice_if_there_is_one(trainer, monkeypatch, slices):
    made = []
    monkeypatch.setattr(driver, "StreamedUpdates", lambda *args: made.append(args) or "streamed")
    trainer.inference = SimpleNamespace(lane_at=lambda number: f"slice {number}" if slices else None)
    part = parts.streamed(trainer, groups_of(trainer), options="options", deferred=True)
    assert trainer.director.training == part == "streamed"
    ((_, run, options, lanes, each, _, deferred),) = made
    assert (run, options, list(lanes), each, deferred) == ("run", "options", [0, 1, 2, 3], 2, True)
    lane = lanes._lane_of(3)
    if slices:
        assert lane == "slice 3"
        return
    assert isinstance(lane, Lane)
    assert (lane.name, lane._timeout) == ("update 3", 11.0)
    lane.close()


def test_the_exports_of_all_ranks_count_as_one():
    ranks = [Export((f"bucket {n}",), 10**n, frozenset({"frozen"})) for n in range(3)]
    assert joined(ranks) == Export(("bucket 0", "bucket 1", "bucket 2"), 111, frozenset({"frozen"}))
