"""Help texts: -h everywhere, examples in each that name commands there are, and no source file to look into."""

import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from bad_inputs import PROBLEM, WORKLOAD

from verl_fuse.cli.main import GROUPS, SUBCOMMANDS, main

SCHEDULE = ("from-model", "solve", "show", "compare")
COMMANDS = [[], *([name] for name in SUBCOMMANDS), *(["schedule", name] for name in SCHEDULE)]


def help_of(arguments: list[str], flag: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, flag])
    assert end.value.code == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch):
    """Options are not broken."""
    monkeypatch.setenv("COLUMNS", "240")
    monkeypatch.setenv("TERMINAL_WIDTH", "240")


@pytest.mark.parametrize("command", COMMANDS, ids=lambda words: " ".join(words) or "verl-fuse")
def test_every_help_text_has_examples_and_points_to_no_source(command: list[str], capsys: pytest.CaptureFixture[str]):
    text = help_of(command, "-h", capsys)
    assert text == help_of(command, "--help", capsys)
    assert not re.search(r"\w\.py\b", text)
    _, mark, below = text.partition("Examples:")
    assert mark
    assert all(len(line.rstrip()) < 80 for line in below.splitlines())
    lines = [line.strip() for line in re.sub(r"\\\s*\n\s*", "", below).splitlines() if line.strip()]
    assert lines
    for line in lines:
        words = shlex.split(re.split(r"   +| > ", line)[0])
        assert words[0] == "verl-fuse"
        assert words[1] in SUBCOMMANDS
        if command:
            known = help_of([word for word in words[1:3] if word in (*SUBCOMMANDS, *SCHEDULE)], "-h", capsys)
            assert [word for word in words if word.startswith("--") and word not in known] == []


@pytest.mark.parametrize("command", ["ab", "advise", "compare", "tune"])
def test_paragraphs_are_filled(command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERMINAL_WIDTH", "80")
    description = help_of([command], "-h", capsys).partition("Usage:")[2].partition("╭")[0]
    paragraphs = [block.splitlines() for block in re.split(r"\n *\n", description.strip())[1:]]
    assert len(paragraphs) > 1
    for lines in paragraphs:
        for line, following in itertools.pairwise(map(str.strip, lines)):
            assert len(line) + 1 + len(following.split()[0]) > 78, line


def test_the_keys_of_json_are_documented(
    documented_keys: dict[str, set[str]], capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    """Of `trace`, `simulate --from`, `doctor`, `profile` and `tune`, which need a run, verl or torch,
    beside their other tests."""
    step, problem, schedule = (tmp_path / name for name in ("step.yaml", "problem.json", "schedule.json"))
    step.write_text(json.dumps(WORKLOAD))
    problem.write_text(json.dumps(PROBLEM))
    model = "--actor llama-7b --critic llama-7b --actor-layout tp8,pp4 --critic-layout tp8,pp4"
    commands = {
        "simulate": f"simulate {step} h100 --seeds 1 --strategy observe",
        "plan": f"plan {step} h100 --strategy fsdp",
        "schedule from-model": f"schedule from-model h100x4 {model} --out {tmp_path}/made.json",
        "schedule solve": f"schedule solve {problem} --method greedy --out {schedule}",
        "schedule show": f"schedule show {schedule}",
        "schedule compare": f"schedule compare {problem} --time-limit 1",
    }
    for name, line in commands.items():
        words = [word.replace(",", " ") if word.startswith("tp8") else word for word in line.split()]
        with pytest.raises(SystemExit) as end:
            main([*words, "--json"])
        assert end.value.code == 0, name
        data = json.loads(capsys.readouterr().out)
        assert set(data) == documented_keys[name], name


@pytest.mark.parametrize(
    "command", ["trace", "simulate", "plan", "doctor", "profile", "tune", *(f"schedule {n}" for n in SCHEDULE)]
)
def test_every_command_with_numbers_has_json(command: str, capsys: pytest.CaptureFixture[str]):
    assert "--json" in help_of(command.split(), "-h", capsys)


def test_the_list_of_commands_is_grouped_by_what_one_wants(capsys: pytest.CaptureFixture[str]):
    text = help_of([], "-h", capsys)
    places = [text.index(f"\n{title}:\n") for title in GROUPS]
    assert places == sorted(places)
    for (title, entries), end in zip(GROUPS.items(), [*places[1:], len(text)], strict=True):
        section = text[text.index(f"\n{title}:\n") : end]
        assert re.findall(r"^  ([a-z]+) ", section.partition("Examples")[0], flags=re.MULTILINE) == [*entries]
