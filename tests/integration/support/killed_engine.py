"""External module for test runs (VERL_USE_EXTERNAL_MODULES): kills the engine process of a replica in one step, once
some samples are finished, or that of the replica which is about to take over the tail.

$KILL_ENGINE holds step, replica and number of samples, or step and `move`, with colons in between. Whom it killed is
written to $STEP_RECORD_DIR/victim.json.
"""

import functools
import json
import os
import signal
import time
from pathlib import Path

from verl_fuse.host.upstream.on_import import on_import
from verl_fuse.host.upstream.vllm import engine_processes


def engine_process(server):
    """Runs inside a rollout server: the process of vLLM's engine."""
    (process,) = engine_processes(server)
    # In a run with forks the engine is the fork of that process (forked/site/sitecustomize.py).
    first, _, fork = _name(process.pid).partition(" ")
    return int(fork) if first == "fork" else process.pid


def _name(pid):
    return Path(f"/proc/{pid}/comm").read_text().strip()


def _kill(trainer, replica):
    import ray

    victim = Path(os.environ["STEP_RECORD_DIR"]) / "victim.json"
    if victim.exists():
        return
    server = trainer.llm_server_manager.get_replicas()[replica].servers[0]
    pid = ray.get(server.__ray_call__.remote(engine_process), timeout=60)
    name = _name(pid)
    finished = len(trainer.watch.finished)
    os.kill(pid, signal.SIGKILL)
    victim.write_text(
        json.dumps({"pid": pid, "name": name, "replica": replica, "finished": finished, "time": time.time()})
    )


def _kill_an_engine(module):
    step, *when = os.environ["KILL_ENGINE"].split(":")
    begin = module.FuseTrainer.on_init_end

    @functools.wraps(begin)
    def on_init_end(self):
        director = self.director
        look, migrate = director.look, director.migrate

        def looked(watch):
            look(watch)
            if self.global_steps == int(step) and len(watch.finished) >= int(when[1]):
                _kill(self, int(when[0]))

        def moved(migration, view):
            if self.global_steps == int(step):
                _kill(self, migration.survivors[0])
            migrate(migration, view)

        if when == ["move"]:
            director.migrate = moved
        else:
            director.look = looked
        begin(self)

    module.FuseTrainer.on_init_end = on_init_end


on_import("verl_fuse.host.trainer", _kill_an_engine)
