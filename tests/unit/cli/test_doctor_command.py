"""`verl-fuse doctor`: what it prints of its findings. What it finds is tested against real installations."""

import json
import signal
from collections.abc import Iterator

import pytest

from verl_fuse.cli import doctor, findings, patches
from verl_fuse.cli.findings import Finding
from verl_fuse.cli.main import main
from verl_fuse.errors import FuseError
from verl_fuse_patches import registry
from verl_fuse_patches.registry import PatchStatus

FOUND = (Finding("Python", "ok", "3.11"), Finding("verl", "fault", "not installed", "pip install it"))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        main(["doctor", *arguments])
    said = capsys.readouterr()
    return int(end.value.code or 0), said.out, said.err


@pytest.mark.parametrize(("findings", "code"), [(FOUND, 1), (FOUND[:1], 0)])
def test_a_fault_sets_the_exit_code(monkeypatch, capsys, documented_keys, findings: tuple[Finding, ...], code: int):
    def examine(*, ray, report):
        print("a library that prints")
        report("checking versions")
        yield from findings

    monkeypatch.setattr(doctor, "examine", examine)
    ended, out, err = run(capsys, "--json")
    data = json.loads(out)
    assert set(data) == documented_keys["doctor"]
    assert (ended, data["healthy"], len(data["findings"])) == (code, code == 0, len(findings))
    assert err == "a library that prints\n"
    assert ("fix: pip install it" in run(capsys)[1]) is (code == 1)


def test_ctrl_c_shows_what_was_found_so_far(monkeypatch, capsys):
    def examine(*, ray, report) -> Iterator[Finding]:
        yield FOUND[0]
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(doctor, "examine", examine)
    code, out, err = run(capsys)
    assert code == 130
    assert "Python" in out
    assert err == "verl-fuse: interrupted\n"


def test_patches_fit_a_page_but_for_addresses(monkeypatch, capsys):
    statuses = [PatchStatus(name, "", "off") for name in registry.NAMES]
    monkeypatch.setattr(patches, "examine", lambda: statuses)
    code, out, _ = run(capsys, "--patches")
    assert code == 0
    assert [line for line in out.splitlines() if len(line) > 100 and len(line.split()) > 1] == []
    for status in statuses:
        patch = registry.load(status.name)
        assert f"off: {patch.name}\n" in out
        assert f"  {patch.upstream}\n" in out


def test_a_plugin_without_its_lock_file_is_a_fault(monkeypatch):
    def lacking(manager, config):
        raise FuseError("acme:f is not in contracts.lock.json")

    monkeypatch.setattr(findings, "installed", lambda name: "0.9.1")
    monkeypatch.setattr(findings, "host_seams", list)
    monkeypatch.setattr(findings, "plugin_seams", lacking)
    found = [(one.state, one.detail) for one in findings.contracts()]
    assert found == [("fault", "acme:f is not in contracts.lock.json"), ("ok", "0 of 0 as they were read")]
