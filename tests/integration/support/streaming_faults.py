"""External module for test runs (VERL_USE_EXTERNAL_MODULES): plants the fault named by STREAMING_FAULT, to show that a test can fail."""

import os

from verl_fuse.host.on_import import on_import


def _break(module):
    fault = os.environ["STREAMING_FAULT"]
    run = module.SampleInference._run

    def broken(self, index, keys, tags):
        if fault == "drop_micro_group" and index == 0:
            for done in self._done.values():
                done.update(keys)
            return
        run(self, index, keys, tags)
        if fault == "wrong_row" and index == 0:
            import transfer_queue as tq

            data = tq.kv_batch_get(keys=keys[:1], partition_id="train", select_fields=["values"])
            data["values"] = data["values"] + 1e-3
            tq.kv_batch_put(keys=keys[:1], partition_id="train", fields=data)

    module.SampleInference._run = broken


on_import("verl_fuse.host.inference", _break)
