"""The invariants in the docstring of verl_fuse/host/start/compat/signature.py."""

import ast

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat.signature import differences, read_signature, signature_text

PINNED = "async (self, batch, metrics, prefix='seqlen', *, keep=False, **kwargs)"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "def f(a: int, /, b: str = 'x', *c: int, d, e: int | None = None, **f: int) -> int: ...",
            "(a, /, b='x', *c, d, e=None, **f)",
        ),
        ("async def f(self): ...", "async (self)"),
        ("@staticmethod\ndef f(a): ...", "static (a)"),
        ("@classmethod\n@abstractmethod\nasync def f(cls): ...", "async class (cls)"),
        ("@functools.cached_property\ndef f(self): ...", "property (self)"),
        ("@register(mode=Mode.ALL)\ndef f(self, key=lambda x: x): ...", "(self, key=lambda x: x)"),
    ],
)
def test_a_signature_as_a_contract_writes_it(source: str, text: str):
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    assert signature_text(node) == text
    assert differences(text, text) == []


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ("(self, batch, metrics, prefix='seqlen', *, keep=False, **kwargs)", "was async, is plain"),
        ("async static (self, batch, metrics, prefix='seqlen', *, keep=False, **kwargs)", "was async, is async static"),
        ("async (self, batch, prefix='seqlen', *, keep=False, **kwargs)", "parameter metrics is gone"),
        ("async (self, data, metrics, prefix='seqlen', *, keep=False, **kwargs)", "parameter batch is gone"),
        ("async (self, metrics, batch, prefix='seqlen', *, keep=False, **kwargs)", "parameter batch moved"),
        (
            "async (self, batch, metrics, *, prefix='seqlen', keep=False, **kwargs)",
            "parameter prefix is keyword-only now",
        ),
        (
            "async (self, batch, metrics, /, prefix='seqlen', *, keep=False, **kwargs)",
            "parameter metrics is positional-only now",
        ),
        ("async (self, batch, metrics, prefix='seqlen', **kwargs)", "parameter keep is gone"),
        ("async (self, batch, metrics, prefix='seqlen', *, keep=False)", "takes no **kwargs any more"),
        (
            "async (self, batch, metrics, prefix='seqlen', *, keep=False, extra, **kwargs)",
            "new required parameter extra",
        ),
        (
            "async (self, batch, metrics, prefix='len', *, keep=False, **kwargs)",
            "default of prefix was 'seqlen', is 'len'",
        ),
        ("async (self, batch, metrics, prefix='seqlen', *, keep, **kwargs)", "parameter keep has no default any more"),
    ],
)
def test_what_a_call_could_trip_over_breaks(found: str, text: str):
    breaks = [difference.text for difference in differences(PINNED, found) if difference.breaks]
    assert text in breaks


@pytest.mark.parametrize(
    ("pinned", "found", "text"),
    [
        ("(a)", "(a, b=1)", "new optional parameter b"),
        ("(a)", "(a, *, b=1)", "new optional parameter b"),
        ("(a)", "(a, **more)", "takes *args or **kwargs now"),
    ],
)
def test_what_a_call_cannot_notice_breaks_only_a_closed_override(pinned: str, found: str, text: str):
    assert [(d.breaks, d.text) for d in differences(pinned, found)] == [(False, text)]
    assert [(d.breaks, d.text) for d in differences(pinned, found, closed=True)] == [(True, text)]


def test_a_new_default_is_no_break():
    assert [(d.breaks, d.text) for d in differences("(a)", "(a=1)")] == [(False, "parameter a has a default now")]


def test_a_default_written_as_dots_may_be_any_but_must_be_there():
    assert differences("(a=...)", "(a=7)") == []
    assert [d.text for d in differences("(a=...)", "(a)")] == ["parameter a has no default any more"]


@pytest.mark.parametrize("text", ["(a", "sync (a)", "a, b"])
def test_what_is_no_signature_is_refused(text: str):
    with pytest.raises(FuseError, match="signature"):
        read_signature(text)
