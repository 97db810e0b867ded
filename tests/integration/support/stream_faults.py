"""External module: ends a training rank, as a device that fails does, with gradients of step $STREAM_DIES_AT that wait;
0: none."""

import functools
import os
import signal

from verl_fuse.host.upstream.on_import import on_import
from verl_fuse_update.stream.options import ORDER


def _mortal(module):
    from verl.utils.tensordict_utils import get_non_tensor_data

    stock = module.StreamTrainingWorker.stream_rows

    @functools.wraps(stock)
    def stream_rows(self, data):
        order = get_non_tensor_data(data, ORDER, default=None)
        found = stock(self, data)
        if order.step == int(os.environ["STREAM_DIES_AT"]) and not order.last:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    module.StreamTrainingWorker.stream_rows = stream_rows


on_import("verl_fuse_update.stream.worker", _mortal)
