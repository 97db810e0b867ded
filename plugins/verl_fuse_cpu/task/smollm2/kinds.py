"""The kinds of problems: a family of reasoning-gym with settings, and how a response's answer is read.

`rates.py` measures how often the model answers each kind right before it is trained. README.md has the rates of the
kinds, and of families that were tried with other settings and examples.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.extras import install

# Another version may draw other problems.
REASONING_GYM = "0.1.25"
# A family draws so many problems a seed.
MOST = 100_000


def number(response: str) -> str:
    """Return the last number of the response, without commas, or an empty text."""
    found = re.findall(r"-?\d+(?:,\d{3})*(?:\.\d+)?", response)
    return found[-1].replace(",", "") if found else ""


def yes_or_no(response: str) -> str:
    """Return the first Yes or No of the response, or an empty text."""
    found = re.search(r"\b(yes|no)\b", response, re.IGNORECASE)
    return found[0].capitalize() if found else ""


def text(response: str) -> str:
    """Return the response without quotation marks and a full stop."""
    return response.strip().strip("\"'.")


@dataclass(frozen=True)
class Kind:
    """A kind of problem: its name is verl's `data_source`, `share` its part of every data set. So many solved problems
    (`examples`) stand before a question as turns of the chat: a response is then short and often has the right form,
    and without them it is long."""

    name: str
    family: str
    settings: dict[str, Any]
    read: Callable[[str], str]
    share: float
    examples: int = 0


KINDS = (
    Kind("leap_year", "calendar_arithmetic", {"tasks": ["is_leap_year"], "leap_year_range": 2000}, yes_or_no, 0.3, 2),
    Kind("reversed_words", "word_sequence_reversal", {"min_words": 2, "max_words": 2}, text, 0.2, 2),
    Kind("sum", "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, number, 0.2),
    Kind("product", "products", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}, number, 0.1),
    Kind("story", "gsm_symbolic", {}, number, 0.2),
)
BY_NAME = {kind.name: kind for kind in KINDS}


def require_reasoning_gym() -> None:
    """Raise a FuseError unless the version that the problems are drawn with is installed."""
    try:
        found = version("reasoning-gym")
    except PackageNotFoundError:
        raise FuseError(
            f"the problems and their verifiers need reasoning-gym, which is not installed: {install('real')}"
        ) from None
    if found != REASONING_GYM:
        raise FuseError(f"reasoning-gym {found} is installed; needs {REASONING_GYM}: another one draws other problems")


def dataset(kind: Kind, seed: int) -> Any:
    """Return the problems of a kind that follow from the seed, each with question, answer and metadata."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    # reasoning-gym adds a problem's number to its seed.
    return reasoning_gym.create_dataset(kind.family, seed=seed * MOST, size=MOST, **kind.settings)


@cache
def verifier(family: str) -> Callable[[str, dict[str, Any]], float]:
    """Return the family's function of an answer and a problem: 1 if the answer is right."""
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    # Its annotation there says that it takes no arguments.
    function: Any = reasoning_gym.get_score_answer_fn(family)
    return function
