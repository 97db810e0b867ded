"""This external module of the bench `placement`, the same in every run, forces lengths and measures whole steps like
`step_arms`."""

import importlib
from typing import Any

import step_arms  # noqa: F401  measures, and pins devices

from verl_fuse.host.upstream.on_import import on_import


def _register_agent(module: Any) -> None:
    # Hydra looks the agent up by its module and name.
    importlib.import_module("heavy_tail_agent")


on_import("verl.experimental.agent_loop", _register_agent)
