import logging
from types import ModuleType

import pluggy
import pytest

from verl_fuse.host.record.logs import VERL, join_verl_log

PACKAGES = (VERL, "verl_fuse", "some_plugin", "other_plugin", "company.rl", "own_log")


class Kept(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


@pytest.fixture
def manager():
    """With a module and an object as plugins; loggers are as before afterwards."""
    before = {name: {**vars(logging.getLogger(name)), "handlers": []} for name in PACKAGES}
    manager = pluggy.PluginManager("verl_fuse")
    manager.register(ModuleType("some_plugin.hooks"))
    manager.register(type("Plugin", (), {"__module__": "other_plugin.hooks"})())
    manager.register(type("Plugin", (), {"__module__": "company.rl.hooks"}))
    manager.register(ModuleType("own_log.hooks"))
    yield manager
    for name, state in before.items():
        vars(logging.getLogger(name)).update(state)


@pytest.fixture
def verl_log():
    handler = Kept()
    logger = logging.getLogger(VERL)
    logger.handlers = [handler]
    logger.setLevel("INFO")
    return handler.lines


def test_lines_go_where_verl_s_go_whatever_the_root_logger_lets_through(manager, verl_log, caplog, monkeypatch):
    join_verl_log(manager)
    root = Kept()
    monkeypatch.setattr(logging.getLogger(), "handlers", [root])
    with caplog.at_level("CRITICAL"):
        for name in ("verl_fuse.host.rollout.replicas", "some_plugin.hooks", "other_plugin", "company.rl.hooks"):
            logging.getLogger(name).info("of %s", name)
            logging.getLogger(name).debug("too much")
    assert verl_log == [
        "verl-fuse: of verl_fuse.host.rollout.replicas",
        "verl-fuse: of some_plugin.hooks",
        "verl-fuse: of other_plugin",
        "verl-fuse: of company.rl.hooks",
    ]
    assert root.lines == [], "printed once"


def test_a_package_with_a_log_of_its_own_keeps_it(manager, verl_log):
    own = Kept()
    logging.getLogger("own_log").addHandler(own)
    join_verl_log(manager)
    logging.getLogger("own_log").error("mine")
    assert (own.lines, verl_log) == (["mine"], [])


def test_without_a_log_of_verl_nothing_is_changed(manager, caplog):
    logging.getLogger(VERL).handlers = []
    join_verl_log(manager)
    logging.getLogger("some_plugin").error("seen")
    assert caplog.messages == ["seen"]
