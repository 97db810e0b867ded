"""Opens a key-value store of torch that listens at one address.

torch's own store listens on all interfaces of a machine, whatever host it is given, and every process that reaches its
port may write the values that a run reads there.

Invariant (tests/unit/runtime/test_listening.py): the process listens at no other address.
"""

import socket
from datetime import timedelta

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]


def listening_store(address: str, timeout: timedelta) -> TCPStore:
    """Return the server's side, at a free port (`.port`) of `address`; `timeout` bounds its own waits."""
    host = address.strip("[]")
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = listener.getsockname()[1]
    # The store closes the socket.
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timeout,
        master_listen_fd=listener.detach(),
    )
