"""Each kind of contract: what keeps it green, what makes it yellow, what breaks it."""

import ast
from pathlib import Path

import pytest

from verl_fuse.host.start.compat.fingerprint import fingerprint
from verl_fuse.host.start.compat.judge import Level, judge
from verl_fuse.host.start.compat.seams import Seam, judge_all, lines
from verl_fuse.host.start.compat.source import SourceTree
from verl_fuse.spec.contract import (
    Attribute,
    Class,
    Code,
    ConfigGroup,
    ConfigKey,
    Contract,
    Decorator,
    Function,
    Registration,
    Uses,
)

SOURCE = '''
class Base: ...
class Trainer(Base):
    mode: str = "sync"
    @register(mode=Mode.ALL, devices=["cuda", "npu"])
    def step(self, batch, limit=3):
        """Doc."""
        return self.run(batch)  # now
    def save(self):
        if self.mode != "sync":
            return self.mode
Registry.register("vllm", load)
for plugin in plugins:
    try:
        plugin.load()
    except Exception: ...
'''
YAML = "defaults:\n- rollout@actor.rollout: rollout\n- _self_\ntrainer:\n  mode: sync\n  steps: 10\n  limit: null\n"
STEP = "acme:Trainer.step"
BODY = fingerprint([ast.parse(SOURCE).body[1].body[1]])  # type: ignore[attr-defined]
USES = Uses("acme", "mode", ("acme:Trainer.save: self.mode != 'sync'",), ("acme:Trainer.save: self.mode",))


def judged(folder: Path, contract: Contract, source: str = SOURCE, yaml: str = YAML) -> list[tuple[str, str]]:
    (folder / "__init__.py").write_text(source)
    (folder / "config.yaml").write_text(yaml)
    return [(problem.level.name, problem.text) for problem in judge(contract, SourceTree({"acme": folder}))]


GREEN = [
    Function(STEP, "(self, batch, limit=3)", BODY),
    Function(STEP, "(self, batch, limit=...)"),
    Class("acme:Trainer", ("Base",)),
    Attribute("acme:Trainer.mode", "'sync'"),
    Attribute("acme:Trainer.mode"),
    Decorator(STEP, 'register(mode=Mode.ALL, devices=["cuda", "npu"])'),
    Registration("acme", 'Registry.register("vllm", load)'),
    ConfigKey("acme/config.yaml", "trainer.mode", "sync"),
    ConfigKey("acme/config.yaml", "trainer.steps", int),
    ConfigKey("acme/config.yaml", "trainer.limit", object),
    ConfigKey("acme/config.yaml", "trainer.limit", None),
    ConfigGroup("acme/config.yaml", "rollout@actor.rollout: rollout"),
    ConfigGroup("acme/config.yaml", "_self_"),
    USES,
    Code("acme:Trainer.step", BODY, "speed"),
    Class("acme:Trainer", abstract=()),
    Class("acme:Trainer", required=()),
    Registration("acme", "plugin.load()"),
    Function(STEP, "(self, batch, limit=3)", ("0123456789abcdef", BODY)),
    Code("acme:Trainer.step", ("0123456789abcdef", BODY), "speed"),
    Code("acme:Trainer.step", BODY, promise="steps are exact"),
    Code("acme:Moved.step", BODY, "speed", before=("acme:Moved.stride", "acme:Trainer.step")),
    Code("acme:Trainer.step", BODY, "speed", before=("acme:Trainer.save",)),
    Function(STEP, "(self, batch, limit=3)", BODY, exact=True),
]


@pytest.mark.parametrize("contract", GREEN, ids=lambda contract: type(contract).__name__)
def test_what_is_kept_is_green(contract: Contract, tmp_path: Path):
    assert judged(tmp_path, contract) == []


@pytest.mark.parametrize("contract", GREEN, ids=lambda contract: type(contract).__name__)
def test_comments_docstrings_and_formatting_change_nothing(contract: Contract, tmp_path: Path):
    source = SOURCE.replace('"""Doc."""', "'Other.'").replace("# now", "# later").replace("(batch)", "( batch )")
    assert judged(tmp_path, contract, source, "# A comment.\n" + YAML) == []


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("contract", "old", "new", "expected"),
    [
        (GREEN[0], "self.run(batch)", "self.go(batch)", [("YELLOW", "body changed: fingerprint was")]),
        (GREEN[23], "self.run(batch)", "self.go(batch)", [("RED", f"body changed: fingerprint was {BODY}, is")]),
        (GREEN[1], "limit=3", "limit=4, more=None", [("YELLOW", "new optional parameter more")]),
        (GREEN[1], "step(self, batch", "step(self, data", [("RED", "parameter batch is gone"), ("RED", "new required parameter data")]),
        (GREEN[1], "def step", "def steps", [("RED", "acme:Trainer has no step")]),
        (GREEN[1], "    def step(self, batch, limit=3):", "    class step:", [("RED", "is not a function any more")]),
        (GREEN[2], "Trainer(Base)", "Trainer(Other)", [("RED", "is not a Base any more")]),
        (GREEN[2], "class Trainer(Base)", "def Trainer(Base)", [("RED", "is not a class any more")]),
        (GREEN[3], '= "sync"', '= "async"', [("RED", "value was 'sync', is 'async'")]),
        (GREEN[3], ': str = "sync"', ": str", [("RED", "value was 'sync', is gone")]),
        (GREEN[4], "    mode: str", "    kind: str", [("RED", "acme:Trainer has no mode")]),
        (GREEN[5], "Mode.ALL", "Mode.ONE", [("RED", 'decorator register(mode=Mode.ALL, devices=["cuda", "npu"]) is gone')]),
        (GREEN[5], '"npu"]', '"npu", "xpu"]', [("YELLOW", "decorator has grown: register(")]),
        (GREEN[5], '["cuda", "npu"]', '["npu"]', [("RED", "decorator register(")]),
        (GREEN[6], '"vllm", load', '"sglang", load', [("RED", 'call Registry.register("vllm", load) is gone')]),
        (GREEN[14], "self.run(batch)", "self.go(batch)", [("RED", "patch speed: the patched code changed: fingerprint was")]),
        (GREEN[15], "    def save", "    @abc.abstractmethod\n    def save", [("RED", "new abstract member save")]),
        (GREEN[16], "    mode: str", "    limit: ClassVar[int]\n    size: int\n    mode: str", [("RED", "new required field size")]),
        (GREEN[18], "self.run(batch)", "self.go(batch)", [("YELLOW", f"body changed: fingerprint was 0123456789abcdef or {BODY}, is")]),
        (GREEN[19], "self.run(batch)", "self.go(batch)", [("RED", f"patch speed: the patched code changed: fingerprint was 0123456789abcdef or {BODY}, is")]),
        (GREEN[20], "self.run(batch)", "self.go(batch)", [("RED", f"steps are exact: the code that keeps this promise changed: fingerprint was {BODY}, is")]),
        (GREEN[21], "self.run(batch)", "self.go(batch)", [("RED", f"patch speed: the patched code changed: fingerprint was {BODY}, is")]),
        (GREEN[21], "def step", "def steps", [("RED", "acme has no Moved")]),
        (GREEN[17], "plugin.load()", "plugin.start()", [("RED", "call plugin.load() is gone")]),
        (USES, "        return self.run", "        if self.mode == 'x': ...\n        return self.run", [("RED", "new comparison in acme:Trainer.step: self.mode == 'x'")]),
        (USES, "        return self.run", "        match self.mode:\n            case 'x': ...\n        return self.run", [("RED", "new comparison in acme:Trainer.step: match self.mode")]),
        (USES, 'self.mode != "sync"', "self.plain", [("RED", "comparison gone from acme:Trainer.save: self.mode != 'sync'")]),
        (USES, "return self.mode", "return 1", [("YELLOW", "use gone from acme:Trainer.save: self.mode")]),
        (USES, "return self.mode", "return self.mode, config['mode']", [("YELLOW", "new use in acme:Trainer.save: 'mode'")]),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_a_change_of_code_has_its_class(contract, old, new, expected, tmp_path: Path):
    assert old in SOURCE
    found = judged(tmp_path, contract, SOURCE.replace(old, new))
    assert [level for level, _ in found] == [level for level, _ in expected]
    assert all(text.startswith(start) for (_, text), (_, start) in zip(found, expected, strict=True))


# ruff: disable[E501]  (a table of data)
@pytest.mark.parametrize(
    ("contract", "old", "new", "text"),
    [
        (GREEN[7], "mode: sync", "mode: async", "default was 'sync', is 'async'"),
        (GREEN[7], "  mode: sync\n", "", "acme/config.yaml: there is no key trainer.mode"),
        (GREEN[8], "steps: 10", "steps: '10'", "default was a int, is '10'"),
        (GREEN[9], "limit", "bound", "acme/config.yaml: there is no key trainer.limit"),
        (ConfigKey("acme/config.yaml", "trainer.steps", 10), "steps: 10", "steps: 10.0", "default was 10, is 10.0"),
        (GREEN[11], "actor.rollout: rollout", "actor.rollout: fast", "the defaults list has no rollout@actor.rollout: rollout"),
        (GREEN[11], "defaults:", "mended:", "the defaults list has no rollout@actor.rollout: rollout"),
        (ConfigKey("acme/other.yaml", "trainer", object), "", "", "there is no file acme/other.yaml"),
    ],
)  # fmt: skip
# ruff: enable[E501]
def test_a_change_of_configuration_breaks(contract, old, new, text, tmp_path: Path):
    assert judged(tmp_path, contract, yaml=YAML.replace(old, new)) == [("RED", text)]


def test_a_missing_module_is_named_once_with_how_many_contracts_need_it(tmp_path: Path):
    (tmp_path / "__init__.py").write_text("")
    seams = [Seam("us", Attribute(f"acme.gone:{name}")) for name in "ab"]
    verdicts = judge_all([*seams, Seam("us", Attribute("other:x"))], SourceTree({"acme": tmp_path}))
    assert lines(verdicts, Level.RED) == ["there is no module acme.gone (2 contracts)"]
    assert [verdict.absent for verdict in verdicts] == [False, False, True]
    assert [verdict.level for verdict in verdicts] == [Level.RED, Level.RED, Level.GREEN]
