"""Take the Triton kernels of vLLM's rejection sampler out of their source file: the kernels run without vLLM, and
without a GPU in Triton's interpreter.

Invariants (tests/unit/gpu/test_kit.py):
- the text of each function taken has the fingerprint of a version that was read, or the function is named;
- the functions taken are run unchanged; vLLM's launcher of kernels (from 0.31 on), which warms them up, has a short one
  in its place that binds arguments by the same names.
"""

import ast
import importlib.util
import inspect
import os
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.fingerprint import fingerprint

SOURCE = "vllm/v1/sample/rejection_sampler.py"
VLLM_VARIABLE = "VERL_FUSE_GPU_VLLM"
CONSTANTS = ("PLACEHOLDER_TOKEN_ID", "GREEDY_TEMPERATURE", "MAX_SPEC_LEN")
# The functions taken, with their fingerprints in vLLM 0.24.0, 0.28.0 and 0.31.0.
READ: dict[str, tuple[str, ...]] = {
    "rejection_sample": ("8f9db213a72bbfc4", "58f5ab473ef669a0"),
    "expand_batch_to_tokens": ("02068a58862e85e9", "227bd2587c0827af"),
    "generate_uniform_probs": ("f705878d391a526c",),
    "sample_recovered_tokens": ("443a1912c0416b55", "3accacaa9c05ad1c"),
    "rejection_greedy_sample_kernel": ("3d7dd3681265cf50", "39164e4da5d48421"),
    "rejection_random_sample_kernel": ("a7840e3f9eb407b2", "c82181d9627af9f6"),
    "expand_kernel": ("0f00ed3dc736d26a",),
    "sample_recovered_tokens_kernel": ("b32eab73198287a5",),
}
# The functions that choose a kernel's grid and constants, from 0.31 on, with their decorator.
DISPATCHERS: dict[str, tuple[str, ...]] = {
    "_rejection_greedy_sample": ("15d4864de8968ef7",),
    "_rejection_random_sample": ("c6f969d186f657bd",),
    "_expand": ("9ea4a8570b0e09d6",),
    "_sample_recovered_tokens": ("f2b94af937d9f266",),
}
DECORATOR, WARM_UP = "triton_kernel_dispatcher_with_warmup", "_warmup_inputs"
HEAD = """from __future__ import annotations
import torch
import triton
import triton.language as tl
"""


def source() -> str:
    """Return the sampler's text: of the installed vLLM, or of the wheel or file that VLLM_VARIABLE names."""
    if given := os.environ.get(VLLM_VARIABLE):
        path = Path(given)
        if path.suffix == ".whl":
            with zipfile.ZipFile(path) as wheel:
                return wheel.read(SOURCE).decode()
        return path.read_text()
    found = importlib.util.find_spec("vllm")
    if found is None or not found.submodule_search_locations:
        raise FuseError(f"needs vLLM's file {SOURCE}: install vLLM, or set {VLLM_VARIABLE} to its wheel or that file")
    return (Path(found.submodule_search_locations[0]).parent / SOURCE).read_text()


def fingerprints_of(text: str) -> dict[str, str]:
    """Return the fingerprint, by name, of every function in READ and DISPATCHERS that the text defines."""
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return {name: fingerprint([nodes[name]]) for name in (*READ, *DISPATCHERS) if name in nodes}


def unread(found: dict[str, str]) -> dict[str, str]:
    """Return the functions whose text was not read, or which are missing; dispatchers may be missing."""
    there = READ | {name: known for name, known in DISPATCHERS.items() if name in found}
    return {name: found.get(name, "missing") for name, known in there.items() if found.get(name) not in known}


def load(text: str, device: torch.device) -> ModuleType:
    """Return a module of the constants and functions; on a CPU Triton interprets the kernels."""
    if device.type == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    if importlib.util.find_spec("triton") is None:
        raise FuseError("needs triton, not installed here")
    taken = [node for node in ast.parse(text).body if _wanted(node)]
    # Triton reads a kernel's text off its file.
    folder = tempfile.mkdtemp(prefix="verl-fuse-kernels-")
    path = Path(folder) / "vllm_rejection_sampler.py"
    path.write_text(HEAD + "\n\n".join(ast.unparse(node) for node in taken) + "\n")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    setattr(module, DECORATOR, _launched)
    spec.loader.exec_module(module)
    return module


def _launched(*, kernel: Any, warmup_inputs: Callable[..., object]) -> Callable[[Callable[..., Any]], Any]:
    """Stand in for vLLM's decorator of dispatchers: an input is the kernel's argument of the same name, or with `_ptr`
    behind the name, in small letters or capitals."""

    def decorate(dispatcher: Callable[..., Any]) -> Callable[..., None]:
        def launch(*given: Any, **named: Any) -> None:
            inputs = inspect.signature(dispatcher).bind(*given, **named).arguments
            grid, constants = dispatcher(**inputs)
            for name, value in inputs.items():
                names = (name, f"{name}_ptr", name.upper(), f"{name}_ptr".upper())
                bound = next((each for each in names if each in kernel.arg_names), None)
                if bound is not None and bound not in constants:
                    constants[bound] = value
            kernel[grid](**constants)

        return launch

    return decorate


def _wanted(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name.removesuffix(WARM_UP) in READ | DISPATCHERS
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id in CONSTANTS for target in targets)
