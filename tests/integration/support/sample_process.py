"""The actor of test_sample_processes.py; without verl, so that its process starts at once."""

import os
import time
from typing import Any


class Process:
    """What a worker is asked for, at several calls at once."""

    async def generate_sequences(self, batch: Any) -> int:
        return len(batch)

    async def exit(self) -> None:
        os._exit(1)

    async def block(self, seconds: float) -> None:
        """Answer nothing for so long."""
        time.sleep(seconds)
