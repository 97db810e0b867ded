"""A function with one of its constants changed: everything else stays upstream's own code."""

from types import FunctionType

from verl_fuse.errors import FuseError


def with_constant(function: FunctionType, old: str, new: str) -> FunctionType:
    """A copy of `function` in which the string constant `old` is `new`; FuseError if it does not occur."""
    constants = function.__code__.co_consts
    if old not in constants:
        raise FuseError(f"{function.__qualname__} has no constant {old!r}")
    code = function.__code__.replace(co_consts=tuple(new if constant == old else constant for constant in constants))
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__doc__, copy.__qualname__ = (
        function.__kwdefaults__,
        function.__doc__,
        function.__qualname__,
    )
    return copy
