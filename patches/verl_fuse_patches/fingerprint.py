"""Fingerprints of source text: equal when only comments, blank lines, indentation width or line breaks differ.

Nothing is imported to take one: the file is found on the path and parsed, so `verl-fuse doctor` and the tests check a patch of
verl or vLLM without loading either.
"""

import ast
import hashlib
import importlib.util
import io
import tokenize
from pathlib import Path

from verl_fuse.errors import FuseError

# Python 3.12 splits an f-string into several tokens; older versions give one.
_FSTRING_START = getattr(tokenize, "FSTRING_START", -1)
_FSTRING_END = getattr(tokenize, "FSTRING_END", -1)
_IGNORED = {tokenize.COMMENT, tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}
_STRUCTURE = {tokenize.NEWLINE: "\n", tokenize.INDENT: "{", tokenize.DEDENT: "}"}


def source_path(module: str) -> Path:
    """The file of `module`, found without importing it or its parents; FuseError if there is none."""
    top, *rest = module.split(".")
    spec = importlib.util.find_spec(top)
    if spec is not None and spec.submodule_search_locations and rest:
        for location in spec.submodule_search_locations:
            stem = Path(location, *rest)
            for candidate in (stem.with_suffix(".py"), stem / "__init__.py"):
                if candidate.is_file():
                    return candidate
    elif spec is not None and spec.origin is not None and not rest:
        return Path(spec.origin)
    raise FuseError(f"no source file for module {module!r}")


def fingerprint(source: str, qualnames: tuple[str, ...]) -> str:
    """First 16 hex digits of the SHA-256 of the named functions or classes in `source`; FuseError if one is not there."""
    tree = ast.parse(source)
    parts = [_normalised(_segment(source, find_definition(tree, qualname))) for qualname in qualnames]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def find_definition(tree: ast.Module, qualname: str) -> ast.stmt:
    """The function or class `qualname` ("name" or "Class.method") of a parsed module; FuseError if it is not there."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for name in qualname.split("."):
        named = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        found = next((node for node in body if isinstance(node, named) and node.name == name), None)
        if not isinstance(found, named):
            raise FuseError(f"{qualname!r} is not defined")
        body = found.body
    assert found is not None
    return found


def _segment(source: str, node: ast.stmt) -> str:
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    # tokenize wants the first line at column zero; a common indent is cut from every line that has it.
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    return "\n".join(line.removeprefix(indent) for line in lines) + "\n"


def _normalised(source: str) -> str:
    lines = source.splitlines(keepends=True)
    out: list[str] = []
    depth, start = 0, (0, 0)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == _FSTRING_START:
            start = token.start if depth == 0 else start
            depth += 1
        elif token.type == _FSTRING_END:
            depth -= 1
            if depth == 0:
                out.append(_slice(lines, start, token.end))
        elif depth == 0 and token.type not in _IGNORED:
            out.append(_STRUCTURE.get(token.type, token.string))
    return " ".join(out)


def _slice(lines: list[str], start: tuple[int, int], end: tuple[int, int]) -> str:
    if start[0] == end[0]:
        return lines[start[0] - 1][start[1] : end[1]]
    middle = lines[start[0] : end[0] - 1]
    return "".join([lines[start[0] - 1][start[1] :], *middle, lines[end[0] - 1][: end[1]]])
