"""External module for test runs (VERL_USE_EXTERNAL_MODULES): kills the engine process of a replica in one step, once some samples are finished.

$KILL_ENGINE holds step, replica and number of samples, with colons in between. Whom it killed is written to $STEP_RECORD_DIR/victim.json.
"""

import functools
import json
import os
import signal
import time
from pathlib import Path

from verl_fuse.host.on_import import on_import


def engine_process(server):
    """Runs inside a rollout server: the process of vLLM's engine."""
    (process,) = server.engine.engine_core.resources.engine_manager.processes
    return process.pid


def _kill_an_engine(module):
    import ray

    stock = module.FuseTrainer._on_poll
    victim = Path(os.environ["STEP_RECORD_DIR"]) / "victim.json"
    step, replica, finished = map(int, os.environ["KILL_ENGINE"].split(":"))

    @functools.wraps(stock)
    def on_poll(self, watch):
        stock(self, watch)
        if self.global_steps == step and len(watch.tags) >= finished and not victim.exists():
            server = self.llm_server_manager.get_replicas()[replica].servers[0]
            pid = ray.get(server.__ray_call__.remote(engine_process), timeout=60)
            name = Path(f"/proc/{pid}/comm").read_text().strip()
            os.kill(pid, signal.SIGKILL)
            victim.write_text(json.dumps({"pid": pid, "name": name, "finished": len(watch.tags), "time": time.time()}))

    module.FuseTrainer._on_poll = on_poll


on_import("verl_fuse.host.trainer", _kill_an_engine)
