"""A plan made by `verl-fuse plan` for two CPU devices, carried out by a real run (`fuse.plan`)."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from verl_runs import SMALL, SMALL_CRITIC, run

from verl_fuse.spec.plan import Plan

pytest.importorskip("verl")
pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]

# The model of the task (plugins/verl_fuse_cpu/task), as its config.json says.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 111,
    "tie_word_embeddings": False,
}
# A step of SMALL: 6 prompts of which 4 samples each are generated.
WORKLOAD = """
algorithm: ppo
prompts: 6
samples: 4
prompt: "uniform:4-16"
response: "lognormal:median=30,sigma=0.8,max=240"
actor: config.json
critic: config.json
reference: config.json
"""


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "step.yaml").write_text(WORKLOAD)
    command = [str(Path(sys.executable).with_name("verl-fuse")), "plan", "step.yaml", "cpu", "--strategy", "fsdp"]
    subprocess.run([*command, "--out", "plan.json"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "plan.json"


def test_a_run_carries_out_what_the_plan_says(verl_home, plan_file):
    arguments = (*SMALL, *SMALL_CRITIC, "trainer.total_training_steps=1", "trainer.save_freq=-1")
    done = run(verl_home, "ppo-cpu", *arguments, f"fuse.plan={plan_file}", name="planned")
    assert done.code == 0, done.output[-4000:]
    overrides = Plan.read(plan_file).overrides
    tokens = overrides["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"]
    assert f"fuse.plan sets actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens} (was 16384)" in done.output
    assert "fuse.plan sets actor_rollout_ref.actor.use_dynamic_bsz=True (was False)" in done.output
    assert done.accounts()[1]["samples"] == 24
    assert list(done.metrics) == [1]


def test_a_run_on_another_number_of_devices_refuses_the_plan(verl_home, plan_file):
    done = run(verl_home, "ppo-cpu", f"fuse.plan={plan_file}", "trainer.n_gpus_per_node=1", name="refused")
    assert done.code != 0
    assert "this run cannot carry it out" in done.output
    assert "it is for trainer.n_gpus_per_node=2, this run has 1" in done.output
