"""External module for test runs (VERL_USE_EXTERNAL_MODULES): an update waits for the schedule that is being solved, so
that no speed of a machine decides which update is the first fused one."""

import functools

from verl_fuse.host.upstream.on_import import on_import


def _wait(module):
    cls = module.UpdateSchedules
    ready = cls.ready

    @functools.wraps(ready)
    def waited(self):
        self.wait()
        return ready(self)

    cls.ready = waited


on_import("verl_fuse_pipeline.schedules", _wait)
