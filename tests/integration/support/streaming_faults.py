"""External module for test runs (VERL_USE_EXTERNAL_MODULES): plants faults in given steps, to
show that a test can fail.

STREAMING_FAULTS is, for example, `wrong_row:3 drop_micro_group:4`.
"""

import os

from verl_fuse.host.upstream.on_import import on_import


def _break(module):
    faults = dict(reversed(fault.split(":")) for fault in os.environ["STREAMING_FAULTS"].split())
    cls = module.SampleInference
    begin_step, run = cls.begin_step, cls._run

    def counting(self):
        # Its constructor begins once, and every step once more.
        self.step = getattr(self, "step", -1) + 1
        begin_step(self)

    def broken(self, index, keys, tags):
        fault = faults.get(str(self.step)) if index == 0 else None
        if fault == "drop_micro_group":
            for done in self._done.values():
                done.update(keys)
            return
        run(self, index, keys, tags)
        if fault == "wrong_row":
            import transfer_queue as tq

            data = tq.kv_batch_get(keys=keys[:1], partition_id="train", select_fields=["values"])
            data["values"] = data["values"] + 1e-3
            tq.kv_batch_put(keys=keys[:1], partition_id="train", fields=data)

    cls.begin_step, cls._run = counting, broken


on_import("verl_fuse.host.inference.samples", _break)
