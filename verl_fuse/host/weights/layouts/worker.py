"""Extends verl's worker classes: the engine gets another layout at the driver's call, and a checkpoint names the layout
it was written in.

Invariant (tests/integration/test_changed_layouts.py): an engine loads a checkpoint in the layout the checkpoint was
written in, whatever the layout the engine was built in.
"""

import functools
import json
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from verl.single_controller.base.decorator import Dispatch, register

from verl_fuse.errors import FuseError
from verl_fuse.host.record.spans import remote_recorder
from verl_fuse.host.weights.layouts.change import EngineLayout, Moved
from verl_fuse.runtime.reshard.options import TransferOptions
from verl_fuse.spec import files

# The file beside verl's files of a checkpoint.
LAYOUT_FILE = "verl_fuse_layout.json"


def layout_worker_class(model: str, base: type, options: TransferOptions) -> type:
    """Return a subclass of verl's worker class for `model` ("actor" or "critic")."""
    save, load = base.save_checkpoint, base.load_checkpoint  # type: ignore[attr-defined]

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def change_layout(self: Any, fsdp_size: int, version: int) -> Moved:
        """Train in shards of `fsdp_size` ranks from here on; `version` is the version of the weights."""
        # These functions travel to another process by value, and must find that process's module.
        from verl_fuse.host.weights.layouts import worker

        with remote_recorder().span(f"layout of {model}", f"rank {self.rank}", "sync", fsdp_size=fsdp_size) as seen:
            moved = worker.layout(self, model, options).change(fsdp_size, version)
            seen["received_bytes"] = moved.received_bytes
        return moved

    @functools.wraps(save)
    def save_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        from verl_fuse.host.weights.layouts import worker

        saved = save(self, local_path, *args, **kwargs)
        # Every rank writes the file: the folder may belong to one node alone, like verl's own files of a rank.
        worker.note(Path(local_path), worker.layout(self, model, options).fsdp_size)
        return saved

    @functools.wraps(load)
    def load_checkpoint(self: Any, local_path: str, *args: Any, **kwargs: Any) -> Any:
        from verl_fuse.host.weights.layouts import worker

        if (fsdp_size := worker.noted(Path(local_path))) is not None:
            worker.layout(self, model, options).change(fsdp_size, 0)
        return load(self, local_path, *args, **kwargs)

    methods = {"change_layout": change_layout, "save_checkpoint": save_checkpoint, "load_checkpoint": load_checkpoint}
    return type(f"Layout{base.__name__}", (base,), {"__doc__": base.__doc__, **methods})


def layout(worker: Any, model: str, options: TransferOptions) -> EngineLayout:
    """Return the layout of the worker's engine, which must be built."""
    if "_verl_fuse_layout" not in worker.__dict__:
        store: Any = dist.distributed_c10d._get_default_store()
        engine = (worker.actor if model == "actor" else worker).engine
        node = ray.util.get_node_ip_address()
        worker._verl_fuse_layout = EngineLayout(engine, model, store=store, node=node, options=options)
    return worker._verl_fuse_layout


def note(folder: Path, fsdp_size: int) -> None:
    """Write down the layout in which a checkpoint was written."""
    files.write_atomically(folder / LAYOUT_FILE, json.dumps({"fsdp_size": fsdp_size}))


def noted(folder: Path) -> int | None:
    """Return the layout in which a checkpoint was written; None for a checkpoint that names none, which has the
    configuration's layout."""
    file = folder / LAYOUT_FILE
    if not file.exists():
        return None
    said = files.load_json(file)
    if type(said.get("fsdp_size")) is not int:
        raise FuseError(f"{file}: {said!r}; needs fsdp_size, a whole number")
    return said["fsdp_size"]
