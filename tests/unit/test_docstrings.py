"""Docstrings outside tests/ are sentences: a function's docstring begins with an imperative verb, and no docstring
begins with a question word. The test has no dictionary: it refuses first words that cannot be such verbs."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parents[2]
FOLDERS = ("ci", "patches", "plugins", "verl_fuse")
# A docstring that begins so has no subject, and most have no verb.
FRAGMENTS = re.compile("Whether|What|Those|How|Which|Where|Why|Of|From|Beyond|Until|Meanwhile")
# A function's docstring that begins so describes a value, or a condition.
NOUNS = re.compile(
    "An?|The|Every|Each|All|Both|No|One|Two|Some|Several|This|That|These|It|Its|They|There|As|At|After|Before|Between|"
    "By|For|If|In|On|Per|When|With|Within|Without|Least|Mean|Most|Nothing|Number|Old"
)
# A verb; not a plural, a genitive, code or a name: "Seconds of", "verl's", "`key`".
VERB = re.compile("[A-Z][a-z]+(?:-[a-z]+)*(?<![^s]s)")

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def fault(node: Documented) -> str | None:
    """Return the first words of a docstring that is no sentence; None for other nodes."""
    text = ast.get_docstring(node) or ""
    if not text:
        return None
    word = re.split(r"[\s,:;.]", text, maxsplit=1)[0]
    verbless = FRAGMENTS.fullmatch(word)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        verbless = verbless or NOUNS.fullmatch(word) or not VERB.fullmatch(word)
    return " ".join(text.split()[:8]) if verbless else None


def faults(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, Documented) and (found := fault(node)):
            yield found


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_are_sentences(folder: str):
    files = [path for path in sorted((REPO / folder).rglob("*.py")) if "tests" not in path.parts]
    found = {f"{path.relative_to(REPO).as_posix()}: {words}" for path in files for words in faults(path.read_text())}
    assert found == set()


@pytest.mark.parametrize(
    "line",
    [
        "Whether the plan fits.",
        "The plans in which no call waits.",
        "Mean seconds of one stage.",
        "Seconds of one stage.",
        "verl's timers, by name.",
        "`seconds` by stage.",
    ],
)
def test_a_fragment_is_found(line: str):
    assert list(faults(f'def stage():\n    """{line}"""\n')) == [line.rstrip()]


def test_sentences_pass():
    text = (
        '"""Tells the time."""\nclass Clock:\n    """A clock."""\n    def tell(s):\n        """Pass the time on."""\n'
    )
    assert list(faults(text)) == []
