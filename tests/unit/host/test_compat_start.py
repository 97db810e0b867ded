"""Consequences of the verdicts for a run: red refuses with the list, yellow is one warning, green is silent."""

import logging

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.errors import FuseError
from verl_fuse.host.start.compat import start
from verl_fuse.host.start.compat.judge import ContractProblem, Level
from verl_fuse.host.start.compat.seams import Seam, SeamVerdict
from verl_fuse.spec.contract import Attribute, package


def verdict(name: str, *problems: ContractProblem) -> SeamVerdict:
    return SeamVerdict(Seam("us", Attribute(f"verl:{name}")), problems)


GREEN = verdict("kept")
YELLOW = verdict("step", ContractProblem(Level.YELLOW, "body changed"))
RED = verdict("mode", ContractProblem(Level.RED, "value was 1, is 2"))


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch):
    def judged(*verdicts: SeamVerdict) -> None:
        monkeypatch.setattr(start, "installed_verdicts", lambda seams: list(verdicts))

    return judged


def require() -> list[SeamVerdict]:
    return start.require_contracts(plugins.load(), OmegaConf.create({}))


def test_a_broken_contract_refuses_with_the_list(judged):
    judged(GREEN, YELLOW, RED, verdict("gone", ContractProblem(Level.RED, "verl has no gone", missing=True)))
    with pytest.raises(FuseError) as refused:
        require()
    assert "is not what verl-fuse was written for" in str(refused.value)
    assert str(refused.value).endswith(
        ". It rests on what is not there, or differs:\n  - verl:mode: value was 1, is 2\n  - verl has no gone"
    )


@pytest.mark.parametrize(
    ("engine", "judged_packages"),
    [("vllm", {"verl", "transfer_queue", "torch", "vllm"}), ("sglang", {"verl", "transfer_queue", "torch"})],
)
def test_an_engine_that_does_not_generate_is_not_judged(monkeypatch: pytest.MonkeyPatch, engine, judged_packages):
    asked: list[Seam] = []
    monkeypatch.setattr(start, "installed_verdicts", lambda seams: asked.extend(seams) or [])
    start.require_contracts(plugins.load(), OmegaConf.create({"actor_rollout_ref": {"rollout": {"name": engine}}}))
    assert {package(seam.contract) for seam in asked} == judged_packages


@pytest.mark.parametrize(("strategy", "judged"), [("megatron", {"megatron"}), ("fsdp2", set())])
def test_megatron_is_judged_for_runs_that_train_with_it(monkeypatch: pytest.MonkeyPatch, strategy, judged):
    asked: list[Seam] = []
    monkeypatch.setattr(start, "installed_verdicts", lambda seams: asked.extend(seams) or [])
    config = {"critic": {"strategy": strategy}, "fuse": {"pipeline": {"enabled": True}}}
    start.require_contracts(plugins.load(), OmegaConf.create(config))
    assert {package(seam.contract) for seam in asked} & {"megatron"} == judged


def test_a_long_list_is_cut(judged):
    judged(*(verdict(f"n{index:02}", ContractProblem(Level.RED, "is gone")) for index in range(25)))
    with pytest.raises(FuseError, match=r"n19: is gone\n  - and 5 more: verl-fuse doctor lists them$"):
        require()


def test_changed_code_is_one_warning(judged, caplog: pytest.LogCaptureFixture):
    judged(GREEN, YELLOW, YELLOW)
    with caplog.at_level(logging.WARNING):
        start.warn_of_changes(require())
    assert [record.getMessage() for record in caplog.records] == [
        "upstream code has changed since this release was tested with it; watch the first steps:\n"
        "  - verl:step: body changed (2 contracts)"
    ]


def test_kept_contracts_are_silent(judged, caplog: pytest.LogCaptureFixture):
    judged(GREEN)
    start.warn_of_changes(require())
    assert caplog.records == []


def test_an_unsupported_version_is_refused_with_what_is_missing_there(judged, monkeypatch: pytest.MonkeyPatch):
    judged(RED)
    monkeypatch.setattr(start, "installed", {"verl": "0.8.0", "TransferQueue": "0.1.11"}.get)
    with pytest.raises(FuseError, match=r"(?s)^verl 0\.8\.0 is not supported.*verl:mode: value was 1, is 2$"):
        start.require_version()
