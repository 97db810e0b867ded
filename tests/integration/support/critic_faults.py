"""External module: ends the critic's worker, as a device that fails does, in the middle of the update of step
$CRITIC_DIES_AT; once in a run and its resumptions."""

import functools
import os
import signal
from pathlib import Path

from verl_fuse.host.upstream.on_import import on_import


def _mortal(module):
    stock, updates = module.TrainingWorker.train_mini_batch, []

    @functools.wraps(stock)
    def train_mini_batch(self, *args, **kwargs):
        if self.config.model_type == "value_model":
            updates.append(None)
            died = Path(os.environ["CRITIC_DIED"])
            if len(updates) == int(os.environ["CRITIC_DIES_AT"]) and not died.exists():
                died.touch()
                os.kill(os.getpid(), signal.SIGKILL)
        return stock(self, *args, **kwargs)

    module.TrainingWorker.train_mini_batch = train_mini_batch


on_import("verl.workers.engine_workers", _mortal)
