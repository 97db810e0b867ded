"""Two training ranks and two rollout workers in processes of their own, with verl's checkpoint engine `fuse`
between them; no Ray, no vLLM.

Only for processes that have the cpu platform (VERL_PLATFORM=cpu).
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "runtime"))
from ranks import World

TRAINERS, RANKS = 2, 4
CONFIG = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "tie_word_embeddings": False,
}


def synced(world: World, tp: int, make: Callable[[World], tuple[Any, dict]], fault: str = "") -> dict[str, Any]:
    """Two syncs with replicas of `tp` workers: what a worker was given the second time, and the whole
    parameters; or the error.

    `make` gives a training rank's engine, None to a worker, and the whole parameters to both.
    """
    from verl_fuse.errors import FuseError
    from verl_fuse_realloc.sync.checkpoint_engine import FuseCheckpointEngine

    timeout = 5.0 if fault else 60.0
    engine = FuseCheckpointEngine(1 << 16, is_master=world.rank == 0, timeout_seconds=timeout, checksums=True)
    trained, whole = make(world)
    given: dict[str, Any] = {}
    try:
        for version in (3, 4):
            given = _once(world, engine, trained, tp, version, fault if version == 4 else "")
    except FuseError as error:
        # Not finalized, as in verl, where the run ends with it: rank 0 hosts the store in which the
        # others read who is to blame.
        world.failed = engine  # pyright: ignore[reportAttributeAccessIssue]
        return {"error": str(error)}
    return {"given": {name: tensor.clone() for name, tensor in given.items()}, "whole": whole}


def fsdp_engine(world: World) -> tuple[Any, dict[str, Any]]:
    """As much of an engine as a sync looks at, on training ranks; whole parameters on all."""
    import torch
    import transformers
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    config = transformers.Qwen2Config(**CONFIG)
    model = transformers.AutoModelForCausalLM.from_config(config)
    whole = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    # Collective over the world, as every process group.
    mesh = DeviceMesh("cpu", list(range(TRAINERS)))
    if world.rank >= TRAINERS:
        return None, whole
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    described = SimpleNamespace(hf_config=config)
    return SimpleNamespace(module=model, model_config=described, is_param_offload_enabled=False), whole


def _once(world: World, engine: Any, trained: Any, tp: int, version: int, fault: str) -> dict[str, Any]:
    """Do the work of verl's manager for one sync."""
    if world.rank == 0:
        world.store.set(f"metadata {version}", json.dumps(engine.prepare()))
    metadata = [json.loads(world.store.get(f"metadata {version}"))]
    trainers, workers = engine.build_topology(TRAINERS, RANKS - TRAINERS, metadata)
    table = {name: [*trainers[name], *workers[name]] for name in trainers}
    last = world.rank == RANKS - 1
    if fault == "never joins" and last:
        return {}
    engine.init_process_group(**{name: values[world.rank] for name, values in table.items()})
    if trained is not None:
        engine.lend(trained, SimpleNamespace(tensor_model_parallel_size=tp, dtype="bfloat16"))
        asyncio.run(engine.send_weights(iter(()), version))

    async def received() -> dict[str, Any]:
        found: dict[str, Any] = {}
        weights = engine.receive_weights(version + (fault == "other version" and last))
        async for name, tensor in weights:
            found[name] = tensor
            if fault == "dies" and last:
                os._exit(1)
            if fault == "leaves" and last:
                await weights.aclose()
                break
        return found

    found = {} if trained is not None else asyncio.run(received())
    if fault and last:
        return found
    # verl's manager ends a sync once all have done their part.
    world.store.add(f"finished {version}", 1)
    while world.store.add(f"finished {version}", 0) < RANKS:
        time.sleep(0.01)
    engine.finalize()
    return found
