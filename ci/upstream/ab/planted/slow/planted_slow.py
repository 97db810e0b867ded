"""A plugin that costs two seconds a step, like an observer with slow storage."""

import time
from collections.abc import Mapping

from verl_fuse.hookspecs import hookimpl
from verl_fuse.spec.timeline import Timeline

HOOK_API = 2


@hookimpl
def fuse_metrics(timeline: Timeline) -> Mapping[str, float] | None:
    time.sleep(2.0)
    return None
