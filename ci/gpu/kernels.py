"""Take the Triton kernels of vLLM's rejection sampler out of their source file: the kernels run without vLLM, and
without a GPU in Triton's interpreter.

Invariants (tests/unit/gpu/test_kit.py):
- the text of each function taken has the fingerprint of a version that was read, or the function is named;
- the functions taken are run unchanged.
"""

import ast
import importlib.util
import os
import sys
import tempfile
import zipfile
from pathlib import Path
from types import ModuleType

import torch

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.fingerprint import fingerprint

SOURCE = "vllm/v1/sample/rejection_sampler.py"
VLLM_VARIABLE = "VERL_FUSE_GPU_VLLM"
CONSTANTS = ("PLACEHOLDER_TOKEN_ID", "GREEDY_TEMPERATURE", "MAX_SPEC_LEN")
# The functions taken, with their fingerprints in vLLM 0.24.0 and 0.28.0.
READ: dict[str, tuple[str, ...]] = {
    "rejection_sample": ("8f9db213a72bbfc4",),
    "expand_batch_to_tokens": ("02068a58862e85e9",),
    "generate_uniform_probs": ("f705878d391a526c",),
    "sample_recovered_tokens": ("443a1912c0416b55",),
    "rejection_greedy_sample_kernel": ("3d7dd3681265cf50", "39164e4da5d48421"),
    "rejection_random_sample_kernel": ("a7840e3f9eb407b2", "c82181d9627af9f6"),
    "expand_kernel": ("0f00ed3dc736d26a",),
    "sample_recovered_tokens_kernel": ("b32eab73198287a5",),
}
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
    """Return the fingerprint, by name, of every function in READ that the text defines."""
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)}
    return {name: fingerprint([nodes[name]]) for name in READ if name in nodes}


def unread(found: dict[str, str]) -> dict[str, str]:
    """Return the kernels whose text was not read, or which are missing."""
    return {name: found.get(name, "missing") for name, known in READ.items() if found.get(name) not in known}


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
    spec.loader.exec_module(module)
    return module


def _wanted(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef):
        return node.name in READ
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return any(isinstance(target, ast.Name) and target.id in CONSTANTS for target in targets)
