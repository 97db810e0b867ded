"""Compares the signature we rely on with the signature found upstream.

Invariants (tests/unit/host/test_compat_signature.py):
- a difference that could break a call written for the pinned signature is red: a parameter gone, renamed, moved, made
keyword-only or positional-only, a new required parameter, a default lost or changed, async or a method's kind changed;
- a difference that such a call cannot notice is yellow: a new optional parameter, a new default, `*args` or `**kwargs`
added.
"""

import ast
from dataclasses import dataclass, field

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.source import FunctionNode

# A default of the pinned signature that stands for any default.
ANY = "..."
_KINDS = {"staticmethod": "static", "classmethod": "class", "property": "property", "cached_property": "property"}
_PREFIXES = ("async", "static", "class", "property")


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which a signature differs."""

    breaks: bool
    text: str


@dataclass(slots=True)
class Signature:
    """A signature taken apart; `by_position` are the positional-only parameters, `defaults` maps the names of optional
    parameters to source text."""

    prefixes: tuple[str, ...]
    positional: list[str] = field(default_factory=list)
    by_position: frozenset[str] = frozenset()
    keyword_only: list[str] = field(default_factory=list)
    defaults: dict[str, str] = field(default_factory=dict)
    var_positional: bool = False
    var_keyword: bool = False


def signature_text(node: FunctionNode) -> str:
    """Return the signature of a definition in the form that a contract writes."""
    arguments = ast.parse(ast.unparse(node.args).join(("def f(", "): pass"))).body[0]
    assert isinstance(arguments, ast.FunctionDef)
    for argument in ast.walk(arguments.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    return " ".join([*_prefixes(node), f"({ast.unparse(arguments.args)})"])


def read_signature(text: str) -> Signature:
    """Parse a contract's signature; a FuseError if `text` is no signature."""
    start = text.find("(")
    prefixes = tuple(text[:start].split())
    try:
        node = ast.parse(f"def f{text[start:]}: pass").body[0]
    except SyntaxError as error:
        raise FuseError(f"signature {text!r} cannot be parsed: {error.msg}") from error
    if not isinstance(node, ast.FunctionDef) or set(prefixes) - set(_PREFIXES):
        raise FuseError(f"signature {text!r}: only {', '.join(_PREFIXES)} may stand before the parentheses")
    arguments = node.args
    positional = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    keyword_only = [argument.arg for argument in arguments.kwonlyargs]
    defaults = dict(zip(reversed(positional), map(ast.unparse, reversed(arguments.defaults)), strict=False))
    for name, default in zip(keyword_only, arguments.kw_defaults, strict=True):
        if default is not None:
            defaults[name] = ast.unparse(default)
    return Signature(
        prefixes,
        positional,
        frozenset(argument.arg for argument in arguments.posonlyargs),
        keyword_only,
        defaults,
        arguments.vararg is not None,
        arguments.kwarg is not None,
    )


def differences(pinned: str, found: str, *, closed: bool = False) -> list[Difference]:
    """Return the differences of `found` from `pinned`; `closed` makes a new optional parameter a break."""
    ours, theirs = read_signature(pinned), read_signature(found)
    out = []
    if ours.prefixes != theirs.prefixes:
        before, after = (" ".join(side.prefixes) or "plain" for side in (ours, theirs))
        out.append(Difference(True, f"was {before}, is {after}"))
    out += _positional(ours, theirs)
    for name in ours.keyword_only:
        if name not in theirs.keyword_only and name not in theirs.positional:
            out.append(Difference(True, f"parameter {name} is gone"))
    if ours.var_positional and not theirs.var_positional:
        out.append(Difference(True, "takes no *args any more"))
    if ours.var_keyword and not theirs.var_keyword:
        out.append(Difference(True, "takes no **kwargs any more"))
    known = {*ours.positional, *ours.keyword_only}
    for name in (name for name in (*theirs.positional, *theirs.keyword_only) if name not in known):
        required = name not in theirs.defaults
        kind = "required" if required else "optional"
        out.append(Difference(required or closed, f"new {kind} parameter {name}"))
    if (theirs.var_positional, theirs.var_keyword) > (ours.var_positional, ours.var_keyword):
        out.append(Difference(closed, "takes *args or **kwargs now"))
    return out + _defaults(ours, theirs)


def _positional(ours: Signature, theirs: Signature) -> list[Difference]:
    out = []
    for index, name in enumerate(ours.positional):
        if theirs.positional[index : index + 1] == [name]:
            if name in theirs.by_position - ours.by_position - {"self", "cls"}:
                out.append(Difference(True, f"parameter {name} is positional-only now"))
        elif name in theirs.positional:
            out.append(Difference(True, f"parameter {name} moved"))
        elif name in theirs.keyword_only:
            out.append(Difference(True, f"parameter {name} is keyword-only now"))
        else:
            out.append(Difference(True, f"parameter {name} is gone"))
    return out


def _defaults(ours: Signature, theirs: Signature) -> list[Difference]:
    out = []
    for name in (
        name for name in (*ours.positional, *ours.keyword_only) if name in {*theirs.positional, *theirs.keyword_only}
    ):
        before, after = ours.defaults.get(name), theirs.defaults.get(name)
        if before is None and after is not None:
            out.append(Difference(False, f"parameter {name} has a default now"))
        elif before is not None and after is None:
            out.append(Difference(True, f"parameter {name} has no default any more"))
        elif before not in (ANY, after):
            out.append(Difference(True, f"default of {name} was {before}, is {after}"))
    return out


def _prefixes(node: FunctionNode) -> list[str]:
    marks = [_KINDS[name] for mark in node.decorator_list if (name := ast.unparse(mark).rpartition(".")[2]) in _KINDS]
    return [*(["async"] if isinstance(node, ast.AsyncFunctionDef) else []), *marks]
