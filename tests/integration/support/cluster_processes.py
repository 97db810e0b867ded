"""The processes of a Ray cluster that a test has started on this host: they inherited its folder as $RAY_TMPDIR."""

import shutil
from pathlib import Path

import psutil
from ray.cluster_utils import Cluster


def processes_of(folder: Path) -> list[psutil.Process]:
    """Everything that the cluster in `folder` has started."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("RAY_TMPDIR") == str(folder):
                found.append(process)
        except psutil.Error:
            continue
    return found


def shut_down(cluster: Cluster, folder: Path) -> None:
    """End every process, and leave no file."""
    processes = processes_of(folder)
    cluster.shutdown()
    _, alive = psutil.wait_procs(processes, timeout=20)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, timeout=20)
    shutil.rmtree(folder, ignore_errors=True)
