"""Prints, as JSON, a fingerprint of every attribute of verl's modules as this process sees them."""

import hashlib
import importlib
import json
import re
import sys
import types

MODULES = [
    "verl",
    "verl.trainer.main_ppo",
    "verl.trainer.ppo.v1",
    "verl.trainer.ppo.v1.trainer_separate_async",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp.transformer_impl",
    "verl.workers.rollout.llm_server",
    "verl.workers.rollout.replica",
    "verl.workers.rollout.router",
    "verl.checkpoint_engine",
    "verl.utils.distributed",
    "verl.utils.model",
    "verl.experimental.agent_loop",
]


def describe(value, depth=0):
    if isinstance(value, types.FunctionType):
        body = value.__code__
        plain = [const for const in body.co_consts if isinstance(const, str | int | float | bytes | type(None))]
        code = hashlib.sha256(body.co_code + repr((body.co_names, plain)).encode()).hexdigest()[:16]
        return (
            f"function {value.__module__}.{value.__qualname__} {code} "
            f"{[describe(item, 1) for item in value.__defaults__ or ()]}"
        )
    if isinstance(value, classmethod | staticmethod):
        return f"{type(value).__name__} {describe(value.__func__)}"
    if isinstance(value, property):
        return f"property {describe(value.fget)}"
    if isinstance(value, type):
        own = f"class {value.__module__}.{value.__qualname__} {[base.__qualname__ for base in value.__mro__]}"
        if depth or not value.__module__.startswith("verl"):
            return own
        kept = sorted(name for name in vars(value) if name not in IGNORED and not name.startswith("__pydantic"))
        members = {name: describe(vars(value)[name], 1) for name in kept}
        return f"{own} {members}"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: describe(item, 1) for key, item in sorted(value.items())}
    if isinstance(value, str | int | float | bool | bytes | type(None)):
        return stable(value)
    return type(value).__qualname__


def stable(value):
    """The repr without what differs between two processes: addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# Written by Python or derived from the class (pydantic's schemas hold addresses).
IGNORED = {"__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl", "__annotate__"}

for name in MODULES:
    importlib.import_module(name)
found = {
    f"{name}.{attribute}": describe(value)
    for name, module in sorted(sys.modules.items())
    if name.split(".")[0] == "verl" and module is not None
    for attribute, value in sorted(vars(module).items())
    if not attribute.startswith("__")
}
ours = sorted(name for name in sys.modules if name.startswith("verl_fuse"))
json.dump({"attributes": found, "ours": ours, "modules": sorted(sys.modules)}, sys.stdout)
