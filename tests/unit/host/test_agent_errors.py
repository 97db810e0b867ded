"""Errors of agent loops are kept where verl logs them, and told in one sentence. A worker that is dead:
tests/integration/test_routing.py."""

import asyncio
import logging
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

ray = pytest.importorskip("ray")
agent_loop_tq = pytest.importorskip("verl.trainer.ppo.v1.agent_loop_tq")
errors = pytest.importorskip("verl_fuse.host.rollout.agent_errors")
trainers = pytest.importorskip("verl_fuse.host.trainer")


@pytest.fixture
def kept():
    log = logging.getLogger(agent_loop_tq.__name__)
    errors.keep_errors(None)
    errors.keep_errors(None)
    yield log
    for handler in [handler for handler in log.handlers if isinstance(handler, errors.KeptErrors)]:
        log.removeHandler(handler)


def test_verls_worker_logs_the_errors_where_they_are_kept(kept, monkeypatch):
    """verl's own `_run_prompt`: three sessions, of which two fail."""
    written = []

    async def put(key, partition_id, tag):
        written.append(tag["status"])

    async def session(sampling_params, session_id, **fields):
        if session_id:
            raise ValueError(f"no answer\nin session {session_id}")

    monkeypatch.setattr(agent_loop_tq.tq, "async_kv_put", put)
    rollout = SimpleNamespace(n=3, val_kwargs=SimpleNamespace(n=1))
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(rollout=rollout))
    worker = SimpleNamespace(config=config, _run_agent_loop=session)
    run = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class._run_prompt
    asyncio.run(run(worker, {"uid": "u0"}, {}, trajectory={"validate": False}))
    assert written == ["running", "failure"]
    found = errors.take_errors(None)
    assert (found.count, found.first) == (2, "ValueError: no answer in session 1")
    assert errors.take_errors(None) == errors.Errors()


def test_a_record_without_an_error_is_told_by_its_message_and_a_long_one_is_cut(kept):
    kept.warning("Empty output for prompt %s", "u0_1")
    kept.info("no loss")
    assert errors.take_errors(None)[::2] == (1, "Empty output for prompt u0_1")
    kept.error("x" * 300)
    assert errors.take_errors(None).first == "x" * 300
    kept.error("x" * 301)
    assert errors.take_errors(None).first == "x" * 300 + "…"


def test_a_process_that_keeps_nothing_has_nothing_to_tell():
    assert errors.take_errors(None) == errors.Errors()


def test_all_errors_are_one_sentence_with_the_one_that_came_first():
    found = [errors.Errors(3, 20.0, "ValueError: late"), errors.Errors(), errors.Errors(2, 10.0, "KeyError: 'early'")]
    assert errors.sentence(found, 4) == (
        "4 samples are missing and are not trained on; agent loops failed: KeyError: 'early' (and 4 more)"
    )
    assert errors.sentence([errors.Errors(1, 9.0, "OSError: alone")], 0) == "agent loops failed: OSError: alone"
    assert errors.sentence([errors.Errors()], 1) == (
        "1 samples are missing and are not trained on; agent loops logged no error"
    )


@pytest.fixture
def trainer():
    made = trainers.FuseTrainer.__new__(trainers.FuseTrainer)
    made.global_steps, made.parts = 3, []
    made.reward_loop_manager = SimpleNamespace(reward_loop_worker_handles=None)
    made.watch = SimpleNamespace(submitted=None, observers=[])
    made.lane = SimpleNamespace(close=lambda: None)
    made.settings = SimpleNamespace(core=SimpleNamespace(replica_timeout=1.0))
    made.director = SimpleNamespace(routing=SimpleNamespace(by_prompt=False))
    made.config = OmegaConf.create({"actor_rollout_ref": {"rollout": {"engine_kwargs": {}}}})
    return made


def test_a_validation_is_told_of_its_errors(trainer):
    told = []
    trainer.agent_errors = SimpleNamespace(warn=told.append)
    trainer.on_validate_end()
    assert told == ["validation after step 3"]


def test_a_run_that_breaks_off_tells_of_the_errors_first(trainer, monkeypatch):
    told = []

    def fit(self, agent_loop_manager):
        raise RuntimeError("no materializable trajectories")

    monkeypatch.setattr("verl.trainer.ppo.v1.trainer_sync.PPOTrainerSync.fit", fit)
    monkeypatch.setattr(errors.AgentErrors, "warn", lambda self, of: told.append(of))
    with pytest.raises(RuntimeError, match="no materializable"):
        trainer.fit(SimpleNamespace(generate_sequences=None))
    assert told == ["the last rollout"]
    assert [type(observer).__name__ for observer in trainer.watch.observers] == ["SampleProcesses"]
