"""Runs whose Python processes are forks of one that has imported verl, vLLM and Ray: twelve imports of fifteen
processor seconds each become one."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_fuse_cpu.environment import environment as cpu_environment

FOLDER = Path(__file__).parent / "forked"
# Workers that belong to no job yet are not of use then.
NO_PRESTART = {"RAY_prestart_worker_first_driver": "0", "RAY_enable_worker_prestart": "0"}
# To be first on PYTHONPATH of a run, with the variables that `fork_server` yields.
SITE = FOLDER / "site"


@contextmanager
def fork_server() -> Iterator[dict[str, str]]:
    """The variables of runs whose processes are forked, until the context ends. A run's own external modules
    are imported in its forks."""
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/forks"
        environment = {**os.environ, **cpu_environment(), "VERL_USE_EXTERNAL_MODULES": ""}
        command = [sys.executable, str(FOLDER / "server.py"), address]
        with subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as server:
            try:
                assert server.stdout is not None
                while (line := server.stdout.readline()) != "ready\n":
                    if not line:
                        raise RuntimeError(f"{' '.join(command)} ended with {server.wait()} before it was ready")
                yield {"FORK_SERVER": address, **NO_PRESTART}
            finally:
                assert server.stdin is not None
                server.stdin.close()
