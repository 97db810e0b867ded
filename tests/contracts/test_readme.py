"""The README names commands, targets, metrics and files that exist, and its configuration composes."""

import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir, initialize_config_module

from verl_fuse.cli.main import SUBCOMMANDS
from verl_fuse.host.start.settings import load_settings


@pytest.fixture
def readme(repo: Path) -> str:
    return (repo / "README.md").read_text()


def test_every_make_target_exists(readme: str, repo: Path):
    targets = set(re.findall(r"^([a-z]+):", (repo / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"\bmake ([a-z]+)", readme))
    assert {"demo", "test", "setup"} <= named <= targets


def test_every_link_leads_somewhere(readme: str, repo: Path):
    links = [link for link in re.findall(r"\]\(([^)]+)\)", readme) if "://" not in link]
    assert links
    assert [link for link in links if not (repo / link).exists()] == []


def test_every_metric_is_logged_somewhere(readme: str, repo: Path):
    sources = "".join(path.read_text() for folder in ("verl_fuse", "plugins") for path in (repo / folder).rglob("*.py"))
    named = re.findall(r"`(fuse/[a-z_/]+?)(?:/<role>)?`", readme)
    assert len(named) > 5
    assert [name for name in named if f'"{name}' not in sources] == []


def test_the_two_lines_of_yaml_switch_it_on(readme: str, tmp_path: Path):
    (block,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "mine.yaml").write_text(block)
    with initialize_config_dir(str(tmp_path), version_base=None):
        config = compose("mine")
    assert config.trainer.v1.trainer_mode == "fuse"
    assert (config.fuse.preset, config.fuse.interstage.enabled) == ("observe", None)


def test_the_features_it_recommends_are_accepted(readme: str):
    update, interstage = re.findall(r"```sh\n(fuse\..*?)```", readme, re.DOTALL)
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
        assert blocks["speculation"].enabled is (block is update)
        assert settings.idle == ()


def test_every_command_exists_and_every_command_is_named(readme: str):
    assert set(re.findall(r"`verl-fuse ([a-z]+)", readme)) == set(SUBCOMMANDS)
