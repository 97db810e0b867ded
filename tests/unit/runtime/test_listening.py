"""A store listens at the address it was given, and at no other address."""

from datetime import timedelta

import psutil
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from verl_fuse.runtime.listening import listening_store

SOON = timedelta(seconds=10)


def test_a_store_listens_at_its_address_only():
    store = listening_store("127.0.0.2", SOON)
    TCPStore("127.0.0.2", store.port, is_master=False, timeout=SOON).set("route", "known")
    assert store.get("route") == b"known"
    sockets = psutil.Process().net_connections("tcp")
    # A connection to another address would not tell: another process may listen there on the same port.
    listened = [own.laddr.ip for own in sockets if own.status == psutil.CONN_LISTEN and own.laddr.port == store.port]
    assert listened == ["127.0.0.2"]


def test_two_stores_have_ports_of_their_own():
    stores = [listening_store("127.0.0.1", SOON) for _ in range(2)]
    assert stores[0].port != stores[1].port
