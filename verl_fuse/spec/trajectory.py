"""Parses the key under which verl keeps a trajectory: `{uid}_{session}_{index}`."""

from functools import lru_cache
from typing import NamedTuple

from verl_fuse.errors import FuseError


class TrajectoryKey(NamedTuple):
    """Trajectory `index` of rollout session `session` of the prompt group `uid`; a session is one sample of its
    prompt, and may leave several."""

    uid: str
    session: int
    index: int

    @classmethod
    # Every look at the rollout reads the keys of all finished trajectories.
    @lru_cache(1 << 16)
    def parse(cls, key: str) -> "TrajectoryKey":
        """Read from the right: a uid may have underscores of its own."""
        uid, *numbers = key.rsplit("_", 2)
        if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
            raise FuseError(f"trajectory {key!r}: not a key of verl's form {{uid}}_{{session}}_{{index}}")
        return cls(uid, *map(int, numbers))

    @property
    def sample(self) -> tuple[str, int]:
        """Return the prompt and the sample of this trajectory: the same for all trajectories of a session."""
        return self[:2]
