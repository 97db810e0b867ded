"""Parameters of requests for a KV connector, and requests that fail for it."""

import asyncio

import pluggy
import pytest
from omegaconf import OmegaConf

pytest.importorskip("ray")
pytest.importorskip("tensordict")

from verl_fuse import hookspecs
from verl_fuse.errors import FuseError
from verl_fuse.host.rollout import transfer
from verl_fuse.host.rollout.prompts import PromptGroup, announce_prompts, current_group
from verl_fuse.host.rollout.transfer import Transfers
from verl_fuse.spec.step import RequestView

CONFIG = OmegaConf.create({"fuse": {"disabled_plugins": []}})
GROUP = PromptGroup("a", "run step 4")


@pytest.fixture
def asked(monkeypatch):
    """Requests a plugin was asked about; it answers with `answer[0]`, or raises it."""
    seen, answer = [], [{"tag": "4"}]

    class Plugin:
        @hookspecs.hookimpl
        def fuse_transfer(self, request, config):
            assert config is CONFIG
            seen.append(request)
            if isinstance(answer[0], Exception):
                raise answer[0]
            return answer[0]

    manager = pluggy.PluginManager("verl_fuse")
    manager.add_hookspecs(hookspecs)
    manager.register(Plugin())
    monkeypatch.setattr(transfer.plugins, "load", lambda disabled: manager)
    return seen, answer


def test_what_a_plugin_answers_goes_with_the_request(asked):
    params = {"max_tokens": 5, "extra_args": {"other": 1}}
    told = Transfers(CONFIG).tell(params, GROUP, "r1", 30, 12, 2)
    assert told == {"max_tokens": 5, "extra_args": {"other": 1, "kv_transfer_params": {"tag": "4"}}}
    assert params == {"max_tokens": 5, "extra_args": {"other": 1}}
    assert asked[0] == [RequestView("r1", "run step 4", 30, 12, 2)]


def test_an_empty_answer_is_nothing_to_tell(asked):
    asked[1][0] = {}
    assert Transfers(CONFIG).tell({"max_tokens": 5}, GROUP, "r1", 30) == {"max_tokens": 5}


def test_a_request_of_unknown_weights_is_an_error(asked):
    with pytest.raises(FuseError, match="request r1 belongs to no prompt"):
        Transfers(CONFIG).tell({}, None, "r1", 30)
    assert asked[0] == []


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ValueError("no store"), "fuse_transfer failed: ValueError: no store"),
        ("tag", "fuse_transfer returned 'tag'; allowed: a mapping, or None"),
        (None, "no plugin says what the KV connector is told"),
    ],
)
def test_a_plugin_that_fails_fails_the_request(asked, answer, message):
    asked[1][0] = answer
    with pytest.raises(FuseError, match=message):
        Transfers(CONFIG).tell({}, GROUP, "r1", 30)


def test_weights_of_two_runs_two_steps_and_a_validation_have_names_of_their_own():
    class Worker:
        async def _run_prompt(self, prompt, sampling_params, trajectory):
            return current_group().weights

    names = set()
    for run in ("a", "b"):
        worker = Worker()
        announce_prompts(worker, run)
        for step, validate in ((1, False), (2, False), (2, True)):
            trajectory = {"step": step, "validate": validate}
            names.add(asyncio.run(worker._run_prompt({"uid": "u"}, {}, trajectory=trajectory)))
    assert len(names) == 6


def test_a_worker_that_runs_prompts_another_way_is_left_as_it_is():
    class Worker:
        async def _run_prompt(self, sample):
            return sample

    worker = Worker()
    assert not announce_prompts(worker, "run")
    assert not announce_prompts(object(), "run")
    assert vars(worker) == {}


def test_a_worker_that_calls_in_its_own_way_runs_its_prompts():
    class Worker:
        async def _run_prompt(self, prompt, sampling_params, trajectory, trace=False, *more):
            return current_group(), trace, more

    worker = Worker()
    assert announce_prompts(worker, "run")
    assert announce_prompts(worker, "run"), "again"
    for trajectory in ({"step": 1, "validate": False}, {"step": 1}, None):
        group, trace, more = asyncio.run(worker._run_prompt({"uid": "u"}, {}, trajectory, True, 5))
        assert (trace, more) == (True, (5,))
        assert (group is not None) is (trajectory == {"step": 1, "validate": False})
