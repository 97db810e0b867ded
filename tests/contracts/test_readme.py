"""The README is short; it, the guide and the plugin guide name commands, targets, metrics and files that exist, their
configuration composes, and their code runs."""

import dataclasses
import re
from inspect import get_annotations
from pathlib import Path
from types import SimpleNamespace

import pluggy
import pytest
from hydra import compose, initialize_config_dir, initialize_config_module

from verl_fuse import hookspecs
from verl_fuse.cli.main import SUBCOMMANDS
from verl_fuse.host.start.settings import load_settings
from verl_fuse.spec.step import LaneView, RolloutView, Stage
from verl_fuse.spec.timeline import Span
from verl_fuse.timeline.terms import TERMS

REPO = Path(__file__).resolve().parents[2]


def ours(path: Path) -> bool:
    """Tell whether the file is in a folder of the repository."""
    known = (".github", "ci", "patches", "plugins", "recipes", "tests", "verl_fuse", "README.md")
    return path.relative_to(REPO).parts[0] in known


@pytest.fixture
def readme(repo: Path) -> str:
    return (repo / "README.md").read_text()


@pytest.fixture
def guide(repo: Path) -> str:
    return (repo / "verl_fuse/README.md").read_text()


def test_it_is_read_in_a_minute(readme: str):
    assert len(readme.split()) <= 800


def test_the_first_screen_has_versions_install_check_switch_and_picture(readme: str):
    screen = "\n".join(readme.splitlines()[:45])
    for each in (
        "verl 0.9.1",
        "Python 3.11",
        "pip install 'verl-fuse[verl]'",
        "verl-fuse check --script run.sh",
        "trainer.v1.trainer_mode=fuse fuse.preset=fast",
        "](ci/docs/steps.svg)",
    ):
        assert each in screen


def tables(text: str) -> list[str]:
    """The cells of all tables outside code."""
    plain = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    rows = [line.strip().strip("|") for line in plain.splitlines() if line.startswith("|")]
    return [cell for row in rows for cell in re.split(r"(?<!\\)\|", row)]


# SUPPORTED.md is left out: a record of runs, written by a command.
PAGES = sorted(str(path.relative_to(REPO)) for path in REPO.rglob("README.md") if ours(path))
# `python -m ci.docs configuration` writes one line for each key.
GENERATED = "verl_fuse/host/config/README.md"


@pytest.mark.parametrize("page", PAGES)
def test_no_cell_of_a_table_is_a_paragraph(page: str):
    words = {cell: [word for word in cell.split() if "=" not in word] for cell in tables((REPO / page).read_text())}
    assert [cell for cell, said in words.items() if len(said) > 15] == []


@pytest.mark.parametrize("page", [page for page in PAGES if page != GENERATED])
def test_no_line_of_text_is_longer_than_a_line_of_code(page: str):
    plain = re.sub(r"^```.*?^```$", "", (REPO / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    assert [line for line in plain.splitlines() if len(line) > 120 and not line.startswith("|")] == []


def test_it_has_one_picture_of_steps_that_draws_idle_time(readme: str, repo: Path):
    (picture,) = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", readme)
    drawn = (repo / picture).read_text()
    assert len(drawn) < 100_000
    assert drawn.startswith("<svg ")
    assert 'class="idle"' in drawn
    assert "<script" not in drawn


def test_every_make_target_exists(readme: str, repo: Path):
    targets = set(re.findall(r"^([a-z-]+):", (repo / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z-]+)", readme))
    assert {"demo", "test", "setup"} <= named <= targets


def test_every_link_leads_somewhere(readme: str, repo: Path):
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert links
    assert [link for link in links if not (repo / link).exists()] == []


def test_every_metric_is_logged_somewhere(guide: str, repo: Path):
    sources = "".join(path.read_text() for folder in ("verl_fuse", "plugins") for path in (repo / folder).rglob("*.py"))
    named = re.findall(r"`(fuse/[a-z_/]+?)(?:/<role>)?`", guide)
    assert len(named) > 5
    assert [name for name in named if f'"{name}' not in sources] == []


def test_the_two_lines_of_yaml_switch_it_on(readme: str, tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine")
    assert config.trainer.v1.trainer_mode == "fuse"
    assert (config.fuse.preset, config.fuse.interstage.enabled) == ("observe", None)


def test_the_features_the_guide_recommends_are_accepted(guide: str):
    update, interstage = re.findall(r"```sh\n(fuse\..*?)```", guide, re.DOTALL)
    # verl's own defaults lack micro-batch sizes, and have four mini-batches a step.
    run = ["+fuse=default", "trainer.v1.trainer_mode=fuse", "actor_rollout_ref.actor.use_dynamic_bsz=true"]
    actor = "actor_rollout_ref.actor"
    one = ["algorithm.adv_estimator=grpo", f"{actor}.strategy=fsdp2", f"{actor}.ppo_mini_batch_size=1024"]
    one.append("actor_rollout_ref.rollout.name=vllm")
    for block, more in ((update, one), (interstage, [])):
        with initialize_config_module("verl.trainer.config", version_base=None):
            config = compose("ppo_trainer", [*run, *more, *block.split()])
        settings = load_settings(config)
        blocks = settings.blocks
        assert blocks["interstage"].enabled == (block is interstage)
        assert blocks["update"].skip_zero_gradient == blocks["update"].skip_old_log_prob == (block is update)
        assert settings.idle == settings.slower == ()


def test_every_command_exists_and_every_command_is_named(readme: str, guide: str):
    assert set(re.findall(r"`verl-fuse ([a-z]+)", guide)) == set(SUBCOMMANDS)
    assert set(re.findall(r"^verl-fuse ([a-z]+)|`verl-fuse ([a-z]+)", readme, re.MULTILINE)) <= {
        pair for name in SUBCOMMANDS for pair in ((name, ""), ("", name))
    }


def test_the_glossary_says_what_the_pages_say(guide: str):
    terms = dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", guide[guide.index("## Glossary") :], re.MULTILINE))
    assert {term: terms.get(term) for term in TERMS} == TERMS


@pytest.mark.parametrize("view", [RolloutView, LaneView, Span])
def test_the_plugin_guide_has_every_field(repo: Path, view: type):
    text = (repo / "plugins/README.md").read_text()
    table = text[text.index(f"`{view.__name__}`", text.index("## What hooks are given")) :]
    table = table[table.index("| field |") :].split("\n\n")[0]
    rows = [re.findall(r"`([^`]+)`", line)[:2] for line in table.splitlines()[2:]]
    hints = get_annotations(view)
    properties = [name for name, value in vars(view).items() if isinstance(value, property)]
    assert [name for name, _ in rows] == [*(field.name for field in dataclasses.fields(view)), *properties]
    shown = {name: re.sub(r"\b[\w.]+\.(\w+)", r"\1", _named(hints[name])) for name in hints}
    assert {name: kind for name, kind in rows if name in hints and kind != "Category"} == {
        name: kind for name, kind in shown.items() if name != "category"
    }


def _named(hint: object) -> str:
    text = hint.__name__ if isinstance(hint, type) and not hasattr(hint, "__args__") else str(hint)
    return text.replace(str(Stage), "Stage")


def test_the_ten_lines_of_the_plugin_guide_run(repo: Path):
    text = (repo / "plugins/README.md").read_text()
    (code,) = re.findall(r"## Ten lines\n.*?```python\n(.*?)```", text, re.DOTALL)
    assert len(code.splitlines()) <= 10
    scope: dict = {}
    exec(code, scope)
    manager = pluggy.PluginManager("verl_fuse")
    manager.add_hookspecs(hookspecs)
    manager.register(scope["LastSecond"]())
    spans = [SimpleNamespace(category="generate", end=end) for end in (1.0, 4.5, 5.0)]
    assert manager.hook.fuse_metrics(timeline=SimpleNamespace(spans=spans)) == [{"acme/last_second": 2}]
