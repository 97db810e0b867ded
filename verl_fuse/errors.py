"""The one exception type whose message is meant for users."""

from collections.abc import Sequence


class FuseError(Exception):
    """Bad input, an unsupported combination, or a wait that ended: the message names the key or file, the value and the
    allowed values.

    A FuseError may carry several problems, one an argument; its text then lists all problems.
    """

    def __str__(self) -> str:
        return listed(self.args)


def listed(problems: Sequence[object]) -> str:
    """Return one text with all problems: a problem alone as it is, several as a list."""
    if len(problems) < 2:
        return "".join(map(str, problems))
    return "\n  - ".join([f"{len(problems)} problems:", *map(str, problems)])
