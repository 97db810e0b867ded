"""What a rollout server says of its engine (verl_fuse/host/upstream/vllm.py), which may be another one than vLLM's."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray")

from verl_fuse.host.upstream.vllm import engine_processes, fault, generated, kill_engine, kv_cache_tokens

OTHERS = [SimpleNamespace(), SimpleNamespace(engine=SimpleNamespace(engine_core=None))]


@pytest.mark.parametrize("server", OTHERS)
def test_processes_of_an_engine_that_has_none_are_none(server):
    assert list(engine_processes(server)) == []
    assert kill_engine(server) == 0


@pytest.mark.parametrize("server", OTHERS)
def test_what_an_engine_does_not_say_is_none(server):
    assert (kv_cache_tokens(server), generated(server), fault(server)) == (None, None, None)


def test_an_engine_says_what_its_cache_holds_what_it_has_generated_and_that_it_is_dead():
    detokenizer = SimpleNamespace(num_output_tokens=lambda: len(tokens))
    tokens: list[int] = []
    states = {"a": SimpleNamespace(detokenizer=detokenizer), "b": SimpleNamespace(detokenizer=None)}
    cache = SimpleNamespace(num_gpu_blocks=5, block_size=16)
    server = SimpleNamespace(
        engine=SimpleNamespace(
            vllm_config=SimpleNamespace(cache_config=cache),
            output_processor=SimpleNamespace(request_states=states),
            errored=False,
        )
    )
    assert kv_cache_tokens(server) == 80
    before = generated(server)
    assert generated(server) == before
    tokens.append(7)
    assert generated(server) != before
    assert fault(server) is None
    server.engine.errored = True
    assert fault(server) == "its engine process is dead"
