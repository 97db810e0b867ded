import os
import stat

import pytest

from verl_fuse.cli import recipes
from verl_fuse.cli.recipes import all_recipes, find_recipe
from verl_fuse.errors import FuseError


def test_the_shipped_recipes():
    assert [(recipe.name, recipe.algorithm, recipe.prepare) for recipe in all_recipes()] == [
        ("dapo-cpu", "DAPO", "euclid"),
        ("grpo-common-8gpu", "GRPO", None),
        ("grpo-cpu", "GRPO", "euclid"),
        ("grpo-fsdp2-8gpu", "GRPO", None),
        ("grpo-gsm8k-8gpu", "GRPO", None),
        ("grpo-smollm2-cpu", "GRPO", "smollm2"),
        ("grpo-tools-cpu", "GRPO", "euclid-tools"),
        ("ppo-cpu", "PPO", "euclid"),
        ("ppo-gsm8k-8gpu", "PPO", None),
        ("ppo-megatron-8gpu", "PPO", None),
        ("ppo-megatron-cpu", "PPO", "euclid-4-layers"),
        ("ppo-smollm2-cpu", "PPO", "smollm2"),
    ]


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_has_a_readme_and_two_scripts_that_run_it(recipe):
    readme = (recipe.folder / "README.md").read_text()
    for heading in ("## When to use", "## When to skip", "## Time and memory"):
        assert heading in readme
    if recipe.prepare is None:
        assert "not run here" in readme.lower()
    for script, command in (
        ("run.sh", f"verl-fuse run {recipe.name} "),
        ("run_baseline.sh", f"verl-fuse run {recipe.name} --baseline "),
    ):
        path = recipe.folder / script
        assert os.stat(path).st_mode & stat.S_IXUSR
        assert f"exec {command}" in path.read_text()


@pytest.mark.parametrize("recipe", all_recipes(), ids=lambda recipe: recipe.name)
def test_a_recipe_holds_no_absolute_path(recipe):
    text = (recipe.folder / "config.yaml").read_text()
    assert not [word for word in text.split() if word.lstrip("\"'").startswith("/")]


def test_an_unknown_recipe_is_answered_with_the_choices():
    with pytest.raises(
        FuseError,
        match=r"^no recipe 'ppo' \(did you mean 'ppo-cpu'\?\); choose from: dapo-cpu, grpo-common-8gpu, grpo-cpu, "
        r"grpo-fsdp2-8gpu, grpo-gsm8k-8gpu, grpo-smollm2-cpu, grpo-tools-cpu, ppo-cpu, ppo-gsm8k-8gpu, "
        r"ppo-megatron-8gpu, ppo-megatron-cpu, ppo-smollm2-cpu$",
    ):
        find_recipe("ppo")


def test_an_installation_without_recipes_says_where_it_looked(monkeypatch, tmp_path):
    monkeypatch.setattr(recipes.verl_fuse, "__file__", str(tmp_path / "verl_fuse" / "__init__.py"))
    with pytest.raises(
        FuseError, match=r"no recipes in .*recipes or .*verl_fuse_recipes: this installation is incomplete"
    ):
        all_recipes()


def test_a_recipe_without_its_block_is_named(monkeypatch, tmp_path):
    (tmp_path / "recipes" / "odd").mkdir(parents=True)
    (tmp_path / "recipes" / "odd" / "config.yaml").write_text("trainer: {}\n")
    monkeypatch.setattr(recipes.verl_fuse, "__file__", str(tmp_path / "verl_fuse" / "__init__.py"))
    with pytest.raises(FuseError, match=r"odd/config\.yaml: its block `recipe` .* cannot be read"):
        all_recipes()
