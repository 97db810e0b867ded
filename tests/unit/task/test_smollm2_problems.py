"""Problems and verifiers of the SmolLM2 task; what draws or verifies needs reasoning-gym (`make setup-real`)."""

import asyncio
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from types import SimpleNamespace

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.smollm2 import kinds, make
from verl_fuse_cpu.task.smollm2.kinds import BY_NAME, KINDS, number, text, yes_or_no
from verl_fuse_cpu.task.smollm2.make import Parameters
from verl_fuse_cpu.task.smollm2.problems import data_sets, rows, shares

needs_reasoning_gym = pytest.mark.skipif(
    find_spec("reasoning_gym") is None, reason="reasoning-gym is in no stack: make setup-real"
)


def test_there_are_four_kinds_or_more_and_none_has_most_problems():
    assert len(BY_NAME) == len(KINDS) >= 4
    assert max(kind.share for kind in KINDS) <= 0.6
    assert sum(kind.share for kind in KINDS) == pytest.approx(1.0)
    assert Parameters().train >= 500
    for count in (len(KINDS), 128, 640, 641):
        assert sum(shares(count).values()) == count


@pytest.mark.parametrize(
    ("read", "response", "answer"),
    [
        (number, "The sum is 4 + 9 = 13.", "13"),
        (number, "1,300.50", "1300.50"),
        (number, "10, 20", "20"),
        (number, "It is -7", "-7"),
        (number, "none", ""),
        (yes_or_no, "No, yes comes later.", "No"),
        (yes_or_no, "The answer is yes.", "Yes"),
        (yes_or_no, "I do not know", ""),
        (text, ' "Luk."\n', "Luk"),
    ],
)
def test_an_answer_is_read_out_of_a_response(read, response, answer):
    assert read(response) == answer


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"train": 1}, "1 training problems: allowed"),
        ({"validation": 1}, "1 validation problems: allowed"),
        ({"seed": -1}, "seed -1: allowed 0 or more"),
    ],
)
def test_bad_parameters_name_the_value(change, message):
    with pytest.raises(FuseError, match=f"^{message}"):
        Parameters(**change)


def test_without_reasoning_gym_one_sentence_says_how_to_get_it(tmp_path, monkeypatch):
    def not_installed(name):
        raise kinds.PackageNotFoundError(name)

    monkeypatch.setattr(kinds, "version", not_installed)
    with pytest.raises(FuseError, match=r"need reasoning-gym, which is not installed: pip install .*\[real\]'$"):
        make.make(tmp_path / "out", Parameters())
    monkeypatch.setattr(kinds, "version", lambda name: "0.1.26")
    with pytest.raises(FuseError, match=r"^reasoning-gym 0\.1\.26 is installed; needs 0\.1\.25"):
        make.make(tmp_path / "out", Parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_refused_before_anything_is_fetched(tmp_path, monkeypatch):
    monkeypatch.setattr(make, "require_reasoning_gym", lambda: None)
    monkeypatch.setattr(make, "require_gguf", lambda: None)
    monkeypatch.setattr(make.shutil, "disk_usage", lambda path: SimpleNamespace(free=4 * 10**8))
    with pytest.raises(FuseError, match=r"0\.4 GB are free; the task needs 1\.0 GB$"):
        make.make(tmp_path / "out", Parameters(), wheel=str(tmp_path / "none.whl"))
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def drawn():
    return data_sets(640, 128, seed=0)


@needs_reasoning_gym
def test_every_kind_has_its_share_and_no_question_comes_twice(drawn):
    assert {name: len(problems) for name, problems in drawn.items()} == {
        "validation": 128,
        "train": 640,
        "short_prompts": 128,
        "long_prompts": 128,
    }
    for problems in drawn.values():
        counts = {kind.name: sum(problem.kind == kind.name for problem in problems) for kind in KINDS}
        assert counts == shares(len(problems))
    questions = [problem.question for problems in drawn.values() for problem in problems]
    assert len(set(questions)) == len(questions)
    examples = {solved.question for problems in drawn.values() for problem in problems for solved in problem.examples}
    assert examples.isdisjoint(questions)


@needs_reasoning_gym
def test_solved_problems_stand_before_a_question_as_turns_of_the_chat(drawn):
    for row in rows(drawn["validation"], "validation"):
        roles = [turn["role"] for turn in row["prompt"]]
        assert roles == ["user", "assistant"] * BY_NAME[row["data_source"]].examples + ["user"]
    assert {len(problem.chat) for problem in drawn["short_prompts"]} == {1}
    assert {len(problem.chat) for problem in drawn["long_prompts"]} == {9}


DRAW = "from verl_fuse_cpu.task.smollm2.problems import data_sets; print(data_sets(40, 20, int(input())))"


@needs_reasoning_gym
def test_the_seed_decides_the_problems_in_every_process():
    def draw(seed, hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run(
            [sys.executable, "-c", DRAW], input=seed, env=environment, check=True, text=True, stdout=subprocess.PIPE
        ).stdout

    assert draw("3", "1") == draw("3", "2") == f"{data_sets(40, 20, 3)}\n"
    assert data_sets(40, 20, 3) != data_sets(40, 20, 4)


@needs_reasoning_gym
def test_a_kind_that_has_too_few_questions_is_named(monkeypatch):
    monkeypatch.setattr(kinds, "MOST", 100)
    with pytest.raises(FuseError, match=r"^\w+ has \d+ questions: fewer problems are needed$"):
        data_sets(1000, 20, seed=0)


@needs_reasoning_gym
@pytest.mark.filterwarnings("default")
def test_right_and_wrong_answers_through_verls_reward_manager(drawn, repo):
    """Every kind's own right answer earns 1; a sentence around it where the kind reads it out; another answer 0."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("verl")
    import numpy as np
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.reward_loop.reward_manager import get_reward_manager_cls
    from verl.trainer.ppo.reward import get_custom_reward_fn

    task = OmegaConf.load(repo / "plugins/verl_fuse_cpu/config/task/smollm2.yaml")
    function = {"name": "compute_score", **task["reward"]["custom_reward_function"]}
    config = OmegaConf.create({"reward": {"custom_reward_function": function}})
    tokenizer = bytes_tokenizer()
    score = get_custom_reward_fn(config)

    async def reward(row, response):
        manager = get_reward_manager_cls("naive")(config, tokenizer, score)
        ids = torch.tensor([tokenizer(response)["input_ids"]])
        tensors = {
            "responses": ids,
            "prompts": ids[:, :1],
            "attention_mask": torch.ones(1, 1 + ids.shape[1], dtype=torch.long),
        }
        columns = {name: np.array([row[name]], dtype=object) for name in ("data_source", "reward_model", "extra_info")}
        done = await manager.run_single(DataProto.from_dict(tensors=tensors, non_tensors=columns))
        assert done["reward_extra_info"]["acc"] == done["reward_score"]
        return done["reward_score"]

    async def all_rewards():
        found = {}
        for kind in KINDS:
            row, other = [row for row in rows(drawn["validation"], "validation") if row["data_source"] == kind.name][:2]
            right = json.loads(row["reward_model"]["ground_truth"])["answer"]
            wrong = {"Yes": "No", "No": "Yes"}.get(right, "12345")
            found[kind.name] = [await reward(row, response) for response in (right, wrong, "I do not know.")]
            assert other["reward_model"] != row["reward_model"]
        return found

    assert asyncio.run(all_rewards()) == {kind.name: [1.0, 0.0, 0.0] for kind in KINDS}


def bytes_tokenizer():
    """Return a tokenizer of which each byte is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)
