"""Workloads: calls of the algorithms, files, and refusals."""

from pathlib import Path

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.workload import Call, Workload

PPO = """
algorithm: ppo
prompts: 512
prompt: fixed:128
response: lognormal:median=200,sigma=0.8,max=1024
minibatches: 4
actor: llama-2-70b
critic: llama-7b
reference: llama-2-70b
reward: llama-7b
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "workload.yaml"
    path.write_text(text)
    return path


def test_a_ppo_file(tmp_path: Path):
    workload = Workload.read(write(tmp_path, PPO))
    assert (workload.sequences, workload.minibatches, workload.epochs) == (512, 4, 1)
    assert workload.actor == workload.reference == model_named("llama-2-70b")
    assert workload.critic == workload.reward == model_named("llama-7b").as_value_model()
    assert workload.response == LengthDistribution.parse("lognormal:median=200,sigma=0.8,max=1024")


def test_calls_of_ppo(tmp_path: Path):
    scores = ("reward_infer", "reference_infer", "critic_infer", "actor_infer")
    assert Workload.read(write(tmp_path, PPO)).calls == (
        Call("actor_generate", "actor", "generate"),
        Call("reward_infer", "reward", "infer", ("actor_generate",)),
        Call("reference_infer", "reference", "infer", ("actor_generate",)),
        Call("critic_infer", "critic", "infer", ("actor_generate",)),
        Call("actor_infer", "actor", "infer", ("actor_generate",)),
        Call("critic_train", "critic", "train", scores),
        Call("actor_train", "actor", "train", scores),
    )


def test_calls_of_the_smallest_grpo():
    fixed = LengthDistribution.parse("fixed:8")
    workload = Workload("grpo", 4, 2, fixed, fixed, model_named("qwen2.5-0.5b"), old_log_prob=False)
    assert [(call.name, call.after) for call in workload.calls] == [
        ("actor_generate", ()),
        ("actor_train", ("actor_generate",)),
    ]


def test_lengths_and_models_are_relative_to_the_file(tmp_path: Path):
    (tmp_path / "trace.csv").write_text("n\n3\n5\n")
    workload = Workload.read(write(tmp_path, PPO.replace("fixed:128", "trace.csv#n")))
    assert workload.prompt == LengthDistribution.of([3, 5])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("critic: llama-7b\n", "", "critic=none; needs a model with ppo"),
        ("algorithm: ppo", "algorithm: grpo", "critic=llama-7b; needs none with grpo"),
        ("algorithm: ppo", "algorithm: dpo", "workload.algorithm='dpo': needs one of 'ppo', 'grpo'"),
        ("prompts: 512", "prompts: 0", "prompts=0; needs a whole number >= 1"),
        ("prompts: 512", "prompts: many", "workload.prompts='many'"),
        ("prompts: 512\n", "", "missing prompts"),
        ("prompts: 512", "prompts: 2", "minibatches=4 do not divide prompts=2"),
        ("minibatches: 4", "minibatches: 7", "minibatches=7 do not divide prompts=512: .* allowed: a divisor"),
        ("minibatches: 4", "samples: 4\nminibatches: 1024", "minibatches=1024 do not divide prompts=512"),
        ("prompts: 512", "prompts: 99999999999999", "99999999999999 sequences a step; needs at most 262144"),
        ("prompts: 512", "prompts: 512\nsamples: 513", "262656 sequences a step"),
        ("minibatches: 4", "zero_gradient: 1.5", "zero_gradient=1.5; needs a share from 0 to 1"),
        ("minibatches: 4", "epochs: 1001", "epochs=1001; needs at most 1000"),
        ("minibatches: 4", "minibatch: 4", r"workload.minibatch: unknown key \(did you mean 'minibatches'\?\)"),
        ("critic: llama-7b", "critic: llama-9b", "model 'llama-9b': unknown; did you mean"),
        ("fixed:128", "128", "workload.prompt=128: needs a string"),
        ("fixed:128", "none.csv#n", r"none\.csv: cannot be read"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, old: str, new: str, message: str):
    with pytest.raises(FuseError, match=rf"workload\.yaml: .*{message}"):
        Workload.read(write(tmp_path, PPO.replace(old, new)))
