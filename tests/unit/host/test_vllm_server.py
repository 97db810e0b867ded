"""What a rollout server says of its engine (verl_fuse/host/upstream/vllm.py), which may be another one than vLLM's."""

import ast
import asyncio
import importlib.util
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Optional

import pytest

pytest.importorskip("ray")

from verl_fuse.host.upstream.vllm import engine_processes, fault, held, kill_engine, kv_cache_tokens

OTHERS = [SimpleNamespace(), SimpleNamespace(engine=SimpleNamespace(engine_core=None))]


@pytest.mark.parametrize("server", OTHERS)
def test_processes_of_an_engine_that_has_none_are_none(server):
    assert list(engine_processes(server)) == []
    assert kill_engine(server) == 0


# Starts a worker that stands still, says its number and goes on.
CORE = """
import os, signal, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
os.kill(worker.pid, signal.SIGSTOP)
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_an_engine_ends_with_its_workers_though_they_stand_still():
    psutil = pytest.importorskip("psutil")
    core, gone = (subprocess.Popen([sys.executable, "-c", CORE], stdout=subprocess.PIPE, text=True) for _ in range(2))
    for process in (core, gone):
        assert process.stdout is not None
    workers = [psutil.Process(int(process.stdout.readline())) for process in (core, gone)]
    try:
        # A process that has ended meanwhile keeps no other from being ended.
        gone.kill()
        gone.wait()
        manager = SimpleNamespace(processes=[gone, core])
        resources = SimpleNamespace(engine_manager=manager)
        server = SimpleNamespace(engine=SimpleNamespace(engine_core=SimpleNamespace(resources=resources)))
        assert kill_engine(server) == 2
        assert core.wait(timeout=30) < 0
        ended, _ = psutil.wait_procs(workers[:1], timeout=30)
        assert [process.pid for process in ended] == [workers[0].pid]
    finally:
        for process in (core, *workers):
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in (core, gone):
            process.stdout.close()
            process.wait()


@pytest.mark.parametrize("server", OTHERS)
def test_what_an_engine_does_not_say_is_none(server):
    assert (kv_cache_tokens(server), held(server), fault(server)) == (None, None, None)


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
    before = held(server)
    assert held(server) == before
    tokens.append(7)
    assert held(server) != before
    assert fault(server) is None
    server.engine.errored = True
    assert fault(server) == "its engine process is dead"


@pytest.fixture(scope="module")
def park():
    """The gate of verl's server (`_park_until_admitted`), without the server's module, which imports vLLM."""
    found = importlib.util.find_spec("verl")
    if found is None:
        pytest.skip("no verl")
    (verl,) = found.submodule_search_locations
    module = ast.parse((Path(verl) / "workers/rollout/vllm_rollout/vllm_async_server.py").read_text())
    (gate,) = (node for node in ast.walk(module) if getattr(node, "name", "") == "_park_until_admitted")
    names = {"Optional": Optional, "TokenOutput": object, "logger": logging.getLogger()}
    exec(compile(ast.Module([gate], []), "gate", "exec"), names)
    return names["_park_until_admitted"]


def test_a_request_counts_in_the_engine_at_verl_s_gate_and_between_the_two(park):
    async def numbers():
        states = {"a": SimpleNamespace(detokenizer=None)}
        engine = SimpleNamespace(output_processor=SimpleNamespace(request_states=states))
        gate = {"_submission_paused": True, "_rejecting": False, "_admitting": 0, "_resume_event": asyncio.Event()}
        server = SimpleNamespace(engine=engine, **gate)
        yield held(server)
        arriving = [asyncio.create_task(park(server, name)) for name in ("b", "c")]
        await asyncio.sleep(0)
        yield held(server)
        server._submission_paused = False
        server._resume_event.set()
        await asyncio.gather(*arriving)
        yield held(server)
        states |= {"b": states["a"], "c": states["a"]}
        yield held(server)
        # A prefill server's requests are with the servers that decode.
        server._pd_decode_peers = [object()]
        yield held(server)

    async def collected():
        return [None if found is None else found[0] async for found in numbers()]

    assert asyncio.run(collected()) == [1, 3, 2, 3, None]
