"""Fixtures of the tests that drive real verl."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.fork_server import fork_server
from verl_runs import RECORDED, RECORDING, Finished, run

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
# A step of verl_runs.SMALL: 6 prompts of which 4 samples each are generated.
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


@pytest.fixture(scope="session")
def verl_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where recipe runs of this process keep checkpoints and logs; pytest's workers share the tasks."""
    home, shared = tmp_path_factory.mktemp("verl_fuse_home"), tmp_path_factory.getbasetemp()
    tasks = (shared.parent if "PYTEST_XDIST_WORKER" in os.environ else shared) / "tasks"
    tasks.mkdir(exist_ok=True)
    (home / "tasks").symlink_to(tasks)
    return home


@pytest.fixture(scope="session")
def forks() -> Iterator[dict[str, str]]:
    """For runs whose processes need not import everything themselves: what `verl_runs.run` takes as `forks`."""
    with fork_server() as variables:
        yield variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the actor of support/lean_engines.py; meanwhile ranks have the cpu platform. Tests of other models
    have a fixture of their own."""
    from lean_engines import write_model
    from small_engines import cpu_server

    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_model(folder)
        yield folder


@pytest.fixture(scope="session")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `verl-fuse plan` makes of WORKLOAD on two CPU devices."""
    folder = tmp_path_factory.mktemp("plan")
    (folder / "config.json").write_text(json.dumps(MODEL))
    (folder / "step.yaml").write_text(WORKLOAD)
    command = [str(Path(sys.executable).with_name("verl-fuse")), "plan", "step.yaml", "cpu", "--strategy", "fsdp"]
    subprocess.run([*command, "--out", "plan.json"], cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return folder / "plan.json"


@pytest.fixture(scope="session")
def planned(verl_home: Path, plan_file: Path, forks: dict[str, str]) -> Finished:
    """Four steps of PPO that carry out `plan_file`; their rollouts are kept in `verl_home/rollouts`."""
    settings = (*RECORDED, f"skip.rollout_tq.dump_dir={verl_home}/rollouts", "trainer.total_training_steps=4")
    plan = f"fuse.plan={plan_file}"
    done = run(verl_home, "ppo-cpu", *settings, plan, name="planned", experiment=RECORDING, forks=forks)
    assert done.code == 0, done.output[-4000:]
    return done
