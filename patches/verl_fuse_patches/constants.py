"""Change one constant of a function: everything else stays upstream's own code."""

from collections.abc import Iterable
from functools import partial
from types import FunctionType, ModuleType

from verl_fuse.errors import FuseError
from verl_fuse_patches.registry import Patch, owner_of

# Megatron's names of the device or the type of a tensor on CUDA, and the names of the same on the host.
ON_HOST = {"cuda": "cpu"} | {
    f"torch.cuda.{kind}Tensor": f"torch.{kind}Tensor" for kind in ("Float", "Half", "BFloat16")
}


def with_constant(function: FunctionType, old: str, new: str) -> FunctionType:
    """Return a copy of `function` in which the string constant `old`, also in tuples, is `new`; raise FuseError if
    `old` does not occur."""
    constants = _with(function.__code__.co_consts, old, new)
    if constants == function.__code__.co_consts:
        raise FuseError(f"{function.__qualname__} has no constant {old!r}")
    copy = FunctionType(
        function.__code__.replace(co_consts=constants),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (
        function.__kwdefaults__,
        function.__doc__,
        function.__qualname__,
    )
    return copy


def on_host(name: str, target: str, fingerprint: str, *, reason: str, remove_when: str) -> Patch:
    """Return a patch under which the targets, functions and methods of Megatron, work on the host instead of CUDA."""
    module, _, qualnames = target.partition(":")
    return Patch(
        name=name,
        reason=reason,
        upstream=f"https://github.com/NVIDIA/Megatron-LM/blob/core_v0.16.1/{module.replace('.', '/')}.py",
        target=target,
        fingerprints={"==0.16.1": fingerprint},
        remove_when=remove_when,
        apply=partial(_set_constants, qualnames=qualnames.split(",")),
    )


def _set_constants(module: ModuleType, qualnames: Iterable[str]) -> None:
    """Replace the constants of CUDA in the named functions and methods of `module`, where a function has them."""
    for qualname in qualnames:
        owner, name = owner_of(module, qualname)
        found = vars(owner)[name]
        function = found.__func__ if isinstance(found, classmethod) else found
        for old, new in ON_HOST.items():
            if _with(function.__code__.co_consts, old, new) != function.__code__.co_consts:
                function = with_constant(function, old, new)
        setattr(owner, name, classmethod(function) if isinstance(found, classmethod) else function)


def _with(constants: tuple[object, ...], old: str, new: str) -> tuple[object, ...]:
    return tuple(
        _with(constant, old, new) if isinstance(constant, tuple) else new if constant == old else constant
        for constant in constants
    )
