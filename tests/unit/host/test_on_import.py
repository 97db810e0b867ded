import sys

import pytest

from verl_fuse.host.upstream.on_import import on_import


@pytest.fixture
def module_file(tmp_path, monkeypatch):
    def make(name: str, text: str = "value = 1\n") -> str:
        (tmp_path / f"{name}.py").write_text(text)
        return name

    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield make
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_registering_imports_nothing_and_callbacks_run_in_order_before_the_import_returns(module_file):
    name = module_file("watched_one")
    seen = []
    on_import(name, lambda module: seen.append(("first", module.value)))
    on_import(name, lambda module: seen.append(("second", module.value)))
    assert name not in sys.modules
    assert seen == []
    __import__(name)
    assert seen == [("first", 1), ("second", 1)]


def test_an_imported_module_is_handled_at_once(module_file):
    name = module_file("watched_two")
    __import__(name)
    seen = []
    on_import(name, lambda module: seen.append(module.__name__))
    assert seen == [name]


def test_a_callback_runs_once_and_the_module_keeps_its_own_loader(module_file):
    name = module_file("watched_three")
    seen = []
    on_import(name, lambda module: seen.append(1))
    module = __import__(name)
    del sys.modules[name]
    __import__(name)
    assert seen == [1]
    assert type(module.__loader__).__name__ == "SourceFileLoader"
    assert module.__spec__.loader is module.__loader__


def test_an_error_of_a_callback_reaches_the_importer(module_file):
    name = module_file("watched_four")

    def fail(module):
        raise ValueError("callback says no")

    on_import(name, fail)
    for _ in range(2):  # a second try does not slip past the failing callback
        with pytest.raises(ValueError, match="callback says no"):
            __import__(name)


def test_a_missing_module_stays_a_missing_module():
    on_import("no_such_module_for_verl_fuse", lambda module: None)
    with pytest.raises(ModuleNotFoundError, match="no_such_module_for_verl_fuse"):
        __import__("no_such_module_for_verl_fuse")
