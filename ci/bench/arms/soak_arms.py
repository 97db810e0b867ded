"""This external module of the bench `soak` (VERL_USE_EXTERNAL_MODULES) counts, before each step, the rows that
TransferQueue holds.

A line per step goes to $SOAK_ROWS, with the step and the number of rows that earlier steps have left.
"""

import functools
import json
import os
from pathlib import Path
from typing import Any

from verl_fuse.host.upstream.on_import import on_import


def _count_rows(module: Any) -> None:
    begin = module.FuseTrainer.on_step_begin

    @functools.wraps(begin)
    def on_step_begin(self: Any) -> None:
        import transfer_queue as tq

        left = {partition: len(rows) for partition, rows in (tq.kv_list() or {}).items() if rows}
        with Path(os.environ["SOAK_ROWS"]).open("a") as file:
            file.write(json.dumps({"step": self.global_steps, "rows": sum(left.values())}) + "\n")
        begin(self)

    module.FuseTrainer.on_step_begin = on_step_begin


on_import("verl_fuse.host.trainer", _count_rows)
