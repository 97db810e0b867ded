"""Defines the error of a transport whose peer is gone."""


class LostPeer(Exception):
    """The connection to global rank `peer` broke; `reason` is the backend's error."""

    def __init__(self, peer: int, reason: Exception) -> None:
        super().__init__(f"rank {peer}: {reason}")
        self.peer = peer
