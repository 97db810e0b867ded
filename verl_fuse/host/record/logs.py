"""Sends log lines of verl-fuse in the trainer's process to verl's own handlers: other libraries change the level of the
root logger, from which verl keeps its log apart as well (verl.utils.logging_utils).

Invariants (tests/unit/host/test_logs.py):
- loggers of the host and of every plugin's package have verl's handlers and level, and print a line once, with
  "verl-fuse: " before its text: verl's format has no name, and `verl-fuse run` shows only our warnings
  (verl_fuse/cli/screen.py);
- a package that has handlers of its own keeps them; where verl has set up no log, no logger is changed.
"""

import logging
from copy import copy
from types import ModuleType

import pluggy

from verl_fuse.host.names import LOG_PREFIX

VERL = "verl"


def join_verl_log(manager: pluggy.PluginManager) -> None:
    """Join the loggers of the host's packages and of all plugins' packages to verl's log."""
    verl = logging.getLogger(VERL)
    if not verl.handlers:
        return
    packages = {_package(plugin) for plugin in manager.get_plugins()} - {VERL}
    for name in ("verl_fuse", *sorted(packages)):
        logger = logging.getLogger(name)
        if logger.handlers:
            continue
        logger.handlers = [_Marked(handler) for handler in verl.handlers]
        logger.setLevel(verl.level)
        logger.propagate = False


class _Marked(logging.Handler):
    """A handler that hands records to another handler, with LOG_PREFIX before their text."""

    def __init__(self, handler: logging.Handler):
        super().__init__(handler.level)
        self._handler = handler

    def emit(self, record: logging.LogRecord) -> None:
        marked = copy(record)
        marked.msg = f"{LOG_PREFIX}{record.msg}"
        self._handler.handle(marked)


def _package(plugin: object) -> str:
    named = plugin if isinstance(plugin, type) else type(plugin)
    module = plugin.__name__ if isinstance(plugin, ModuleType) else named.__module__
    return module.rpartition(".")[0] or module
