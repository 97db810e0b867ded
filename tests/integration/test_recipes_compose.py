"""Every shipped recipe composes on verl's own configuration and passes verl's own checks, fused and as the baseline."""

import json
import os
import subprocess
import sys

import pytest

from verl_fuse.cli.recipes import all_recipes
from verl_fuse.cli.run import BASELINE

pytestmark = pytest.mark.integration

# One process for all recipes: importing verl takes most of the time. The models named by the GPU recipes are not here,
# so a tiny one stands in; nothing of it is trained.
SCRIPT = """
import json, os, sys
from pathlib import Path
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import omega_conf_to_dataclass, validate_config
from verl.utils import hf_tokenizer
from verl_fuse.host.start.settings import load_settings
from verl_fuse_cpu.task.tokenizer import build_tokenizer
from verl_fuse_cpu.task.warm_start import build_model

model, folders, baseline = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = build_tokenizer()
tokenizer.save_pretrained(model)
build_model(tokenizer).save_pretrained(model)
# transformers replaces some model types' tokenizers by its own when it loads them (see warm_start.build_model).
text = "gcd 15 30;=04"
loaded = hf_tokenizer(str(model))
assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"], "the tokenizer changed when it was loaded"
found, chosen = {}, {}
for name, folder in folders.items():
    for kind, overrides in (("fuse", []), ("baseline", baseline)):
        paths = [f"actor_rollout_ref.model.path={model}", f"critic.model.path={model}"]
        with initialize_config_dir(folder, version_base=None):
            config = compose("config", overrides=[*overrides, *paths])
        OmegaConf.resolve(config)
        reference, critic = need_reference_policy(config), need_critic(config)
        validate_config(config, reference, critic)
        omega_conf_to_dataclass(config.actor_rollout_ref.rollout)
        if critic:
            omega_conf_to_dataclass(config.critic)
        if kind == "fuse":
            # A GPU recipe is checked as on its own machine, where nobody asks for the cpu platform.
            os.environ["VERL_PLATFORM"] = "cpu" if config.trainer.device == "cpu" else ""
            load_settings(config.copy())
            config.fuse.preset = "fast"
            chosen[name] = load_settings(config).chosen
        found[f"{name} {kind}"] = [config.trainer.v1.trainer_mode, "fuse" in config, reference, critic]
print("FOUND " + json.dumps(found))
print("CHOSEN " + json.dumps(chosen))
"""


def test_every_recipe_composes_and_passes_verls_checks(tmp_path):
    folders = {recipe.name: str(recipe.folder) for recipe in all_recipes()}
    arguments = [str(tmp_path / "model"), json.dumps(folders), json.dumps(BASELINE)]
    environment = {**os.environ, "VERL_PLATFORM": "cpu", "VERL_FUSE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments], capture_output=True, text=True, env=environment, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("FOUND "))
    # name: trainer mode, has the block `fuse`, needs a reference policy, needs a critic
    assert json.loads(line.removeprefix("FOUND ")) == {
        "grpo-cpu fuse": ["fuse", True, True, False],
        "grpo-cpu baseline": ["sync", False, True, False],
        "grpo-smollm2-cpu fuse": ["fuse", True, False, False],
        "grpo-smollm2-cpu baseline": ["sync", False, False, False],
        "grpo-tools-cpu fuse": ["fuse", True, True, False],
        "grpo-tools-cpu baseline": ["sync", False, True, False],
        "dapo-cpu fuse": ["fuse", True, False, False],
        "dapo-cpu baseline": ["sync", False, False, False],
        "grpo-common-8gpu fuse": ["fuse", True, True, False],
        "grpo-common-8gpu baseline": ["sync", False, True, False],
        "grpo-fsdp2-8gpu fuse": ["fuse", True, False, False],
        "grpo-fsdp2-8gpu baseline": ["sync", False, False, False],
        "grpo-gsm8k-8gpu fuse": ["fuse", True, True, False],
        "grpo-gsm8k-8gpu baseline": ["sync", False, True, False],
        "ppo-cpu fuse": ["fuse", True, True, True],
        "ppo-cpu baseline": ["sync", False, True, True],
        "ppo-gsm8k-8gpu fuse": ["fuse", True, True, True],
        "ppo-gsm8k-8gpu baseline": ["sync", False, True, True],
        "ppo-megatron-8gpu fuse": ["fuse", True, False, True],
        "ppo-megatron-8gpu baseline": ["sync", False, False, True],
        "ppo-megatron-cpu fuse": ["fuse", True, False, True],
        "ppo-megatron-cpu baseline": ["sync", False, False, True],
        "ppo-smollm2-cpu fuse": ["fuse", True, False, True],
        "ppo-smollm2-cpu baseline": ["sync", False, False, True],
    }
    chosen = next(line for line in done.stdout.splitlines() if line.startswith("CHOSEN "))
    on = {
        name: sorted(line.split("fuse.")[2].split("=")[0] for line in lines if ": without " not in line)
        for name, lines in json.loads(chosen.removeprefix("CHOSEN ")).items()
    }
    # Beside what the recipe itself sets; what the others are refused for is in tests/unit/host/test_preset.py.
    updates = ["update.balance", "update.response_logits", "update.skip_old_log_prob"]
    once = ["update.response_logits", "update.share_prompts", "update.skip_old_log_prob"]
    assert on == {
        "dapo-cpu": ["elastic.enabled", "speculation.enabled", *updates, "update.skip_zero_gradient"],
        "grpo-cpu": ["elastic.enabled", "interstage.enabled", "speculation.enabled", *updates],
        "grpo-common-8gpu": ["elastic.enabled", "interstage.enabled", *updates[:2], "update.share_prompts"],
        "grpo-fsdp2-8gpu": ["elastic.enabled", *once, "update.skip_zero_gradient"],
        "grpo-gsm8k-8gpu": ["elastic.enabled", "interstage.enabled", updates[0]],
        "grpo-tools-cpu": ["speculation.enabled", *updates],
        "ppo-cpu": [
            "elastic.enabled",
            "interstage.enabled",
            "speculation.enabled",
            *updates[:2],
            "update.skip_values",
        ],
        "grpo-smollm2-cpu": ["elastic.enabled", "speculation.enabled", *once, "update.skip_zero_gradient"],
        "ppo-smollm2-cpu": ["speculation.enabled", *updates[1:], "update.skip_values"],
        "ppo-gsm8k-8gpu": ["interstage.enabled", *updates[:2]],
        "ppo-megatron-8gpu": ["interstage.enabled"],
        "ppo-megatron-cpu": ["elastic.enabled", "interstage.enabled", "speculation.enabled"],
    }
