"""The one exception type whose message is meant for users."""


class FuseError(Exception):
    """Bad input, an unsupported combination, or a wait that ended: the message names the key or file, the value and what is allowed."""
