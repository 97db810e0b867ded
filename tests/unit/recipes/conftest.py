import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def signalled_twice() -> Callable[[Path, int], threading.Thread]:
    """Starts a thread that sends this process a signal twice, once a file is there."""

    def signalled_twice(ready: Path, number: int) -> threading.Thread:
        def send() -> None:
            while not ready.exists():
                time.sleep(0.02)
            for _ in range(2):
                os.kill(os.getpid(), number)
                time.sleep(0.5)

        thread = threading.Thread(target=send, daemon=True)
        thread.start()
        return thread

    return signalled_twice
