"""External module for test runs (VERL_USE_EXTERNAL_MODULES): from a length on engines compute at most one token of each
response in `PASS` seconds, until the driver has seen what the step is for.

In the step of $KILL_ENGINE that is the kill of an engine (killed_engine.py, to be named after this module), in every
other step the move of the tail. The length is in $STEP_RECORD_DIR/held meanwhile. An engine of a run without
$KILL_ENGINE, which has imported this module with kv_store.py, is not slowed.
"""

import functools
import os
import time
from pathlib import Path

from forced_lengths import HELD_FOR_KILL, HELD_FOR_MOVE

from verl_fuse.host.upstream.on_import import on_import

# Seconds of a pass that would go on: an engine takes orders between two passes.
PASS = 0.5


def hold(tokens):
    """Runs in an engine before each pass, of which the longest request has so many tokens with its prompt."""
    if "KILL_ENGINE" not in os.environ:
        return
    until = time.monotonic() + PASS
    while time.monotonic() < until and tokens >= _limit():
        time.sleep(0.005)


def _file():
    return Path(os.environ["STEP_RECORD_DIR"]) / "held"


def _limit():
    try:
        return int(_file().read_text() or 0)
    except FileNotFoundError:
        return float("inf")


def _release():
    _file().unlink(missing_ok=True)


def _hold_steps(module):
    trainer = module.FuseTrainer
    prepare, end, begin = trainer.prepare_step, trainer.on_sample_end, trainer.on_init_end
    kill_step = int(os.environ["KILL_ENGINE"].partition(":")[0])

    @functools.wraps(prepare)
    def prepare_step(self):
        _file().parent.mkdir(parents=True, exist_ok=True)
        _file().write_text(str(HELD_FOR_KILL if self.global_steps == kill_step else HELD_FOR_MOVE))
        return prepare(self)

    @functools.wraps(begin)
    def on_init_end(self):
        look, migrate = self.director.look, self.director.migrate

        def looked(watch):
            look(watch)
            if (_file().parent / "victim.json").exists():
                _release()

        def moved(migration, view):
            _release()
            migrate(migration, view)

        self.director.look, self.director.migrate = looked, moved
        begin(self)

    @functools.wraps(end)
    def on_sample_end(self):
        _release()
        end(self)

    trainer.prepare_step, trainer.on_init_end, trainer.on_sample_end = prepare_step, on_init_end, on_sample_end


on_import("verl_fuse.host.trainer", _hold_steps)
