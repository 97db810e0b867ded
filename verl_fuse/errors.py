"""The one exception type whose message is meant for users."""


class FuseError(Exception):
    """Bad input, an unsupported combination, or a wait that ended: the message names the key or file, the value and the
    allowed values.

    A FuseError may carry several problems, one an argument; its text then lists all problems.
    """

    def __str__(self) -> str:
        if len(self.args) < 2:
            return super().__str__()
        return "\n  - ".join([f"{len(self.args)} problems:", *map(str, self.args)])
