"""A store listens at the address it was given, and at no other address."""

import socket
from datetime import timedelta

import pytest
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from verl_fuse.runtime.listening import listening_store

SOON = timedelta(seconds=10)


def test_a_store_listens_at_its_address_only():
    store = listening_store("127.0.0.2", SOON)
    TCPStore("127.0.0.2", store.port, is_master=False, timeout=SOON).set("route", "known")
    assert store.get("route") == b"known"
    for other in ("127.0.0.1", "127.0.0.3"):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((other, store.port), timeout=5)


def test_two_stores_have_ports_of_their_own():
    stores = [listening_store("127.0.0.1", SOON) for _ in range(2)]
    assert stores[0].port != stores[1].port
