"""Change one constant of a function: everything else stays upstream's own code."""

from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, ModuleType

from verl_fuse.errors import FuseError

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


def set_constants(module: ModuleType, qualnames: tuple[str, ...], constants: Mapping[str, str]) -> None:
    """Replace string constants in the named functions and methods of `module`, where a function has them."""
    for qualname in qualnames:
        owner: object = module
        *classes, name = qualname.split(".")
        for part in classes:
            owner = getattr(owner, part)
        found = vars(owner)[name]
        function = found.__func__ if isinstance(found, classmethod) else found
        for old, new in constants.items():
            if _with(function.__code__.co_consts, old, new) != function.__code__.co_consts:
                function = with_constant(function, old, new)
        setattr(owner, name, classmethod(function) if isinstance(found, classmethod) else function)


def on_host(qualnames: tuple[str, ...]) -> Callable[[ModuleType], None]:
    """Return a patch's `apply` under which the named functions and methods work on the host instead of CUDA."""
    return partial(set_constants, qualnames=qualnames, constants=ON_HOST)


def _with(constants: tuple[object, ...], old: str, new: str) -> tuple[object, ...]:
    return tuple(
        _with(constant, old, new) if isinstance(constant, tuple) else new if constant == old else constant
        for constant in constants
    )
