"""Agent loops are built directly, and as Hydra builds them."""

import asyncio
from types import SimpleNamespace

import pytest

pytest.importorskip("ray")
hydra = pytest.importorskip("hydra")
agent_loop = pytest.importorskip("verl.experimental.agent_loop.agent_loop")
agents = pytest.importorskip("verl_fuse.host.rollout.agents")


class Agent:
    def __init__(self, server_manager, **more):
        self.given = {"server_manager": server_manager, **more}

    async def run(self, sampling_params, **fields):
        return self.given, sampling_params, fields


ALONE = {"_target_": f"{Agent.__module__}.{Agent.__qualname__}"}


def test_an_agent_gets_the_same_from_both():
    given = {"server_manager": object(), "tools": [object()], "hf_model_type": "llama", "processor": None}
    # A list is what verl wraps, so that Hydra leaves it alone.
    given["tools"] = agent_loop.ToolListWrap(given["tools"])
    ours, theirs = agents.instantiate(ALONE, **given), hydra.utils.instantiate(config=ALONE, **given)
    assert type(ours) is type(theirs) is Agent
    assert ours.given == theirs.given == given


def made(**given):
    return Agent(**given)


def test_an_agent_may_be_made_by_a_function():
    built = agents.instantiate({"_target_": f"{__name__}.made"}, server_manager=1)
    assert built.given == {"server_manager": 1}


def test_an_agent_that_is_registered_as_a_class_is_built_by_hydra():
    built = agents.instantiate({"_target_": Agent}, server_manager=1)
    assert type(built) is Agent
    assert built.given == {"server_manager": 1}


def test_an_agent_that_asks_for_more_is_built_by_hydra():
    built = agents.instantiate({**ALONE, "limit": 3, "inner": ALONE | {"server_manager": 1}}, server_manager=object())
    assert built.given["limit"] == 3
    assert isinstance(built.given["inner"], Agent), "Hydra builds what is nested"


def test_verls_worker_builds_its_agents_so(monkeypatch):
    monkeypatch.setattr(agent_loop, "hydra", hydra)
    monkeypatch.setitem(agent_loop._agent_loop_registry, "plain", ALONE)
    monkeypatch.setattr(hydra.utils, "instantiate", lambda *args, **kwargs: pytest.fail("Hydra was asked"))

    async def kept(output, validate, **fields):
        return output

    parts = ("config", "llm_client", "tokenizer", "processor", "hf_model_type", "dataset_cls", "tools")
    worker = SimpleNamespace(**{name: SimpleNamespace(data=None) for name in parts}, _agent_loop_postprocess=kept)
    agents.without_hydra(worker)
    trajectory = {"step": 1, "sample_index": 0, "rollout_n": 0, "validate": False}
    asked = agent_loop.AgentLoopWorker._run_agent_loop(worker, {}, trajectory, agent_name="plain", trace=False, uid="u")
    given, _, fields = asyncio.run(asked)
    assert given["server_manager"] is worker.llm_client
    assert given["trainer_config"].config is worker.config
    assert fields == {"uid": "u"}
