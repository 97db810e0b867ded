"""Lock files: what they are filled with, what they keep, what is refused; contracts without their entries."""

from pathlib import Path

import pluggy
import pytest

from ci.upstream import lock as command
from ci.upstream.lock import lock_all
from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import hookspec
from verl_fuse.host.start.compat.judge import Level, judge
from verl_fuse.host.start.compat.lock import FILE, Locked, fill, read
from verl_fuse.host.start.compat.seams import plugin_seams
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.spec.contract import (
    LOCKED,
    Attribute,
    Class,
    Code,
    ConfigGroup,
    ConfigKey,
    Function,
    Name,
    config,
    kept,
    label,
    names,
)

SOURCE = """
class Trainer:
    mode = "sync"
    def rank(self): ...
    def step(self, batch, limit=3):
        return self.run(batch)
    def save(self): ...
def sort(rows, by=FIRST): return sorted(rows)
"""
YAML = "defaults:\n- rollout@actor: fast\n- _self_\ntrainer:\n  steps: 10\n  limit: null\n"
STEP = "acme:Trainer.step"
CONTRACTS = (
    *names("acme:Trainer.step .mode .save()", closed=True),
    *names("acme:Trainer .mode="),
    *names("acme:sort", exact=True),
    *config("acme/config.yaml trainer.steps trainer.limit rollout@actor"),
    kept("files are whole", "acme:Trainer.save"),
)


def test_texts_name_targets_keys_and_groups():
    assert names("acme.a:f() :Trainer.mode= .rank? ._step acme.b:g", closed=True) == (
        Name("acme.a:f", closed=True, called=True),
        Attribute("acme.a:Trainer.mode", LOCKED),
        Attribute("acme.a:Trainer.rank"),
        Name("acme.a:Trainer._step", closed=True),
        Name("acme.b:g", closed=True),
    )
    assert config("acme/a.yaml lr gpus:int note:any end:none actor@block acme/b.yaml ../engine@block") == (
        ConfigKey("acme/a.yaml", "lr", LOCKED),
        ConfigKey("acme/a.yaml", "gpus", int),
        ConfigKey("acme/a.yaml", "note", object),
        ConfigKey("acme/a.yaml", "end", type(None)),
        ConfigGroup("acme/a.yaml", f"actor@block: {LOCKED}"),
        ConfigGroup("acme/b.yaml", f"../engine@block: {LOCKED}"),
    )
    assert kept("files are whole", "acme:Trainer.save .load :write", before="acme:Trainer.save") == Code(
        "acme:Trainer.save,Trainer.load,write", LOCKED, promise="files are whole", before=("acme:Trainer.save",)
    )


class Package:
    """An upstream package, and a lock file of contracts about it."""

    def __init__(self, folder: Path):
        self.folder, self.file = folder / "acme", folder / FILE
        self.folder.mkdir()
        self.write(SOURCE, YAML)
        self.lock()

    def write(self, source: str = SOURCE, yaml: str = YAML) -> None:
        (self.folder / "__init__.py").write_text(source)
        (self.folder / "config.yaml").write_text(yaml)

    @property
    def tree(self) -> SourceTree:
        return SourceTree({"acme": self.folder})

    def locked(self, *renew: str, contracts=CONTRACTS) -> tuple[str, list[str]]:
        texts, broken = lock_all({self.file: contracts}, self.tree, renew)
        return texts[self.file], broken

    def lock(self, *renew: str) -> dict[str, Locked]:
        text, broken = self.locked(*renew)
        assert broken == []
        self.file.write_text(text)
        return read(self.file)


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return Package(tmp_path)


def test_a_lock_file_holds_what_contracts_copy_and_fills_them(package: Package):
    entries = read(package.file)
    (body,) = entries[STEP].read
    step, mode, save, trainer, value, sort, steps, limit, group, code = CONTRACTS
    assert fill(step, entries[STEP]) == Function(STEP, "(self, batch, limit=3)", body, closed=True)
    assert fill(mode, entries["acme:Trainer.mode"]) == Attribute("acme:Trainer.mode")
    assert fill(trainer, entries["acme:Trainer"]) == Class("acme:Trainer")
    assert fill(value, entries["acme:Trainer.mode"]) == Attribute("acme:Trainer.mode", "'sync'")
    sorts = Function("acme:sort", "(rows, by=...)", *entries["acme:sort"].read, exact=True)
    assert fill(sort, entries["acme:sort"]) == sorts, "a constant's name is no default"
    assert fill(group, entries[label(group)]) == ConfigGroup("acme/config.yaml", "rollout@actor: fast")
    assert fill(steps, entries["acme/config.yaml: trainer.steps"]) == ConfigKey("acme/config.yaml", "trainer.steps", 10)
    assert fill(limit, entries["acme/config.yaml: trainer.limit"]).default is None  # type: ignore[union-attr]
    (whole,) = entries["acme:Trainer.save"].read
    assert fill(code, entries["acme:Trainer.save"]) == Code("acme:Trainer.save", whole, promise="files are whole")
    assert fill(save, entries["acme:Trainer.save"]) == Function("acme:Trainer.save", "(self)", closed=True)
    assert [judge(fill(one, entries[label(one)]), package.tree) for one in CONTRACTS] == [[]] * len(CONTRACTS)


def test_one_state_of_the_source_has_one_text(package: Package):
    text = package.file.read_text()
    assert package.locked() == package.locked(contracts=CONTRACTS[::-1]) == (text, [])
    package.file.unlink()
    assert package.locked(contracts=CONTRACTS[::-1]) == (text, [])
    assert text.splitlines()[1:-1] == sorted(text.splitlines()[1:-1])


def test_changed_code_gets_a_further_fingerprint(package: Package):
    before = read(package.file)[STEP]
    package.write(SOURCE.replace("self.run(batch)", "self.run(batch) or {}"))
    after = package.lock()[STEP]
    assert (after.signature, after.read[:1], len(after.read)) == (before.signature, before.read, 2)
    package.write()
    assert package.lock()[STEP] == after


def test_a_further_optional_parameter_stays_yellow(package: Package):
    package.write(SOURCE.replace("limit=3", "limit=3, pace=None"))
    open_step = Name(STEP)
    text, broken = package.locked(contracts=[open_step])
    assert broken == []
    package.file.write_text(text)
    problems = judge(fill(open_step, read(package.file)[STEP]), package.tree)
    assert [(one.level, one.text) for one in problems] == [(Level.YELLOW, "new optional parameter pace")]


@pytest.mark.parametrize(
    ("source", "yaml", "text"),
    [
        (SOURCE.replace("limit=3", "limit=4"), YAML, f"{STEP}: default of limit was 3, is 4"),
        (SOURCE.replace("limit=3", "limit=3, pace=None"), YAML, f"{STEP}: new optional parameter pace"),
        (SOURCE.replace("def step", "def stride"), YAML, f"{STEP}: acme:Trainer has no step"),
        (SOURCE.replace("...", "self.flush()"), YAML, "acme:Trainer.save: files are whole: the code that keeps"),
        (SOURCE.replace("sorted(rows)", "rows"), YAML, "acme:sort: body changed"),
        (SOURCE.replace('"sync"', '"async"'), YAML, "acme:Trainer.mode: value was 'sync', is 'async'"),
        (SOURCE, YAML.replace("fast", "slow"), "acme/config.yaml: defaults, rollout@actor: locked: the defaults list"),
        (SOURCE, YAML.replace("10", "11"), "acme/config.yaml: trainer.steps: default was 10, is 11"),
        (SOURCE, YAML.replace("steps", "count"), "acme/config.yaml: trainer.steps: acme/config.yaml: there is no key"),
    ],
)
def test_what_breaks_a_contract_is_refused(package: Package, source: str, yaml: str, text: str):
    package.write(source, yaml)
    _, broken = package.locked()
    assert len(broken) == 1
    assert broken[0].startswith(text)


def test_a_break_is_taken_over_by_name(package: Package):
    before = read(package.file)[STEP]
    package.write(SOURCE.replace("limit=3", "limit=4"))
    after = package.lock(STEP)[STEP]
    assert after.signature == "(self, batch, limit=4)"
    assert after.read[:1] == before.read
    assert package.locked("acme:Trainer.stepp")[1] == ["--renew acme:Trainer.stepp: no contract has this name"]


def test_what_is_not_installed_keeps_its_entry_and_gets_none(package: Package, tmp_path: Path):
    texts, broken = lock_all({package.file: CONTRACTS}, SourceTree({}))
    assert (texts[package.file], broken) == (package.file.read_text(), [])
    assert lock_all({tmp_path / "new.json": [Name(STEP)]}, SourceTree({}))[1] == [f"{STEP}: acme is not installed"]


def test_a_name_that_nothing_declares_is_dropped(package: Package):
    text, _ = package.locked(contracts=CONTRACTS[:1])
    assert text.count('"kind"') == 1


def test_what_is_new_must_have_what_is_locked(package: Package):
    new = (*names("acme:Trainer.rank= .stride"), *config("acme/config.yaml critic@critic"))
    assert package.locked(contracts=new)[1] == [
        "acme:Trainer.rank: it has no value to lock",
        "acme:Trainer.stride: acme:Trainer has no stride",
        "acme/config.yaml: defaults, critic@critic: locked: acme/config.yaml has 0 entries critic@critic among its "
        "defaults",
    ]


def test_the_command_writes_only_what_changed_and_nothing_where_a_contract_breaks(
    package: Package, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(command, "declared", lambda: {package.file: list(CONTRACTS)})
    monkeypatch.setattr(
        command.SourceTree, "installed", lambda *names: SourceTree({"acme": package.folder, "verl": package.folder})
    )
    assert command.main(["--check"]) == command.main([]) == 0
    text = package.file.read_text()
    package.write(SOURCE.replace("self.run(batch)", "None"))
    assert command.main(["--check"]) == 1
    assert package.file.read_text() == text
    assert command.main([]) == 0
    assert capsys.readouterr().out == f"{package.file} differs\n{package.file} is written\n"
    text = package.file.read_text()
    package.write(SOURCE.replace("limit=3", "limit"))
    assert command.main([]) == 2
    assert f"{STEP}: parameter limit has no default any more" in capsys.readouterr().err
    assert package.file.read_text() == text


class Plugin:
    @pluggy.HookimplMarker("verl_fuse")
    def fuse_contracts(self, config):
        return (Name(STEP),)


def test_a_plugin_whose_lock_lacks_a_name_is_named():
    manager = pluggy.PluginManager("verl_fuse")
    manager.add_hookspecs(type("Specs", (), {"fuse_contracts": staticmethod(hookspec(lambda config: None))}))
    manager.register(Plugin(), "acme")
    with pytest.raises(FuseError, match=f"{STEP} is not in .*{FILE}: `python -m ci.upstream lock` writes it"):
        plugin_seams(manager, None)


@pytest.mark.parametrize("text", ["{", "[]", '{"a": 1}', '{"a": {"kin": "class"}}', '{"a": {}}'])
def test_a_file_that_is_no_lock_is_named(tmp_path: Path, text: str):
    file = tmp_path / FILE
    file.write_text(text)
    with pytest.raises(FuseError, match="is no lock file"):
        read(file)
