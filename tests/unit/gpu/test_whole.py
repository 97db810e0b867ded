"""The invariants in the docstring of ci/gpu/whole/turns.py, and what the comparison of whole steps and the timing of
vLLM's engine compute without a GPU."""

import json
import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

pytest.importorskip("torch")
pytest.importorskip("verl")

from ci.gpu import engine
from ci.gpu.whole import made, turns
from ci.gpu.whole.__main__ import SIZES_OF, faults, figures, overrides, ratio, start, table
from ci.gpu.whole.turns import Turns

ARMS = ["a", "b", "c"]


def take(folder: Path, steps: dict[str, int]) -> list[str]:
    """Let each arm take its turns in a thread of its own; return the arms in the order of their turns."""
    order: list[str] = []

    def run(arm: str) -> None:
        own = Turns(folder, ARMS, arm)
        for _ in range(steps[arm]):
            own.next()
            order.append(arm)
        (folder / f"{arm}.ended").touch()

    threads = [Thread(target=run, args=(arm,)) for arm in reversed(ARMS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return order


def test_runs_take_turns_in_their_order(tmp_path: Path):
    (tmp_path / "begin").touch()
    assert take(tmp_path, {"a": 3, "b": 3, "c": 3}) == ARMS * 3
    lines = [line.split()[0] for line in (tmp_path / "b.turns").read_text().splitlines()]
    assert lines == ["begin", "end", "begin", "end", "begin"]


def test_a_run_that_has_ended_holds_nobody_up(tmp_path: Path):
    (tmp_path / "begin").touch()
    assert take(tmp_path, {"a": 2, "b": 0, "c": 3}) == ["a", "c", "a", "c", "c"]


def test_nobody_begins_before_all_are_ready_or_longer_than_the_longest_wait(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(turns, "LONGEST", 0.2)
    (tmp_path / "begin").touch()
    alone = Turns(tmp_path, ARMS, "a")
    alone.next()
    waited = float((tmp_path / "a.turns").read_text().split()[1])
    assert waited - (tmp_path / "a.asked").stat().st_mtime >= 0.19


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    given = [str(folder), "--size", "tiny", "--ends", "0.01", "--prompts", "20", "--tokens", "15", "--device", "cpu"]
    made.main(given)
    return folder


def test_the_model_ends_with_the_wanted_chance_and_verl_can_build_its_turns(task: Path, capsys):
    import pandas
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

    model = AutoModelForCausalLM.from_pretrained(task / "model", dtype=torch.float32)
    ids = torch.randint(3, made.VOCABULARY["tiny"], (8, 128), generator=torch.Generator().manual_seed(5))
    chance = torch.softmax(model(input_ids=ids).logits, -1)[..., made.END].mean().item()
    assert chance == pytest.approx(0.01, rel=0.2)
    tokenizer = AutoTokenizer.from_pretrained(task / "model")
    assert tokenizer.eos_token_id == made.END
    assert len(tokenizer.encode("\n")) == 1
    create_continuous_token_builder(tokenizer, model_family="auto", hf_model_type="qwen2")
    rows = pandas.read_parquet(task / "prompts.parquet")
    lengths = {len(tokenizer.apply_chat_template(list(row))["input_ids"]) for row in rows["prompt"]}
    assert lengths == {15}
    rewards = [made.compute_score("", text, model["ground_truth"]) for model in rows["reward_model"] for text in "ab"]
    assert len(rows) == 20
    assert rewards == [1.0] * 40
    assert [made.compute_score("", "ab", str(number)) for number in range(3, 6)] == [1.0, 0.0, 0.0]


def test_a_run_that_fails_says_that_it_has_ended(tmp_path: Path):
    run = start("stock", ["stock"], tmp_path, ["no.such.key=1"], 8, "cpu")
    assert run.wait() != 0
    assert (tmp_path / "stock.ended").exists()
    assert "no.such.key" in (tmp_path / "stock" / "run.log").read_text()


def test_stock_has_nothing_of_ours_and_the_arms_differ_in_nothing_else(tmp_path: Path):
    stock, fast, observe = (
        overrides(arm, tmp_path, "cuda", 4, SIZES_OF["cuda"]) for arm in ("stock", "fast-2", "observe")
    )
    assert not [each for each in stock if "fuse" in each]
    ours = {"+fuse=default", "trainer.v1.trainer_mode=fuse"}
    assert {each.replace("fast-2", "stock") for each in fast} - set(stock) == {*ours, "fuse.preset=fast"}
    assert {each.replace("observe", "stock") for each in observe} - set(stock) == ours


def wrote(folder: Path, arm: str, begins: list[float], ends: list[float], data: list[dict]) -> None:
    times = [f"begin {at}" for at in begins] + [f"end {at}" for at in ends]
    (folder / f"{arm}.turns").write_text("\n".join(times) + "\n")
    (folder / arm).mkdir()
    lines = [json.dumps({"step": number, "data": each}) for number, each in enumerate(data, 1)]
    (folder / arm / "metrics.jsonl").write_text("\n".join(lines) + "\n")


def test_the_first_step_and_the_last_are_left_out_of_the_ratio(tmp_path: Path):
    trained = {"fuse/samples_trained": 64.0, "fuse/samples_missing": 0.0}
    wrote(tmp_path, "stock", [0, 20, 40, 60], [10, 26, 44], [{"timing_s/gen": 3.0}] * 4)
    lost = {"timing_s/gen": 2.0, "fuse/samples_trained": 63.0, "fuse/samples_missing": 1.0}
    wrote(tmp_path, "fast", [10, 30], [12, 33], [trained | {"timing_s/gen": 9.0}, lost])
    found = {arm: figures(tmp_path, arm) for arm in ("stock", "fast", "absent")}
    assert found["stock"]["seconds"] == [10, 6, 4]
    assert ratio(found["stock"]["seconds"], found["fast"]["seconds"]) == pytest.approx(3 / 6)
    assert ratio(found["stock"]["seconds"], found["absent"]["seconds"]) is None
    assert faults(found, {"stock": 0, "fast": 0, "absent": 3}, 64) == [
        "absent: exit code 3",
        "fast, step 2: 63 of 64 samples trained, 1 missing",
    ]
    lines = table(found).splitlines()
    assert lines[1].split()[:4] == ["stock", "2", "5.00", "1.000"]
    assert lines[2].split()[:5] == ["fast", "1", "3.00", "0.500", "2.000"]
    assert lines[3].split() == ["absent", "0"]


def test_the_arms_of_the_engine_are_what_they_say(tmp_path: Path, monkeypatch):
    monkeypatch.delenv("DRAFTS", raising=False)
    assert engine.arguments_of("stock", tmp_path) == {}
    ours = engine.arguments_of("history-full", tmp_path / "history")
    assert ours["compilation_config"] == {"cudagraph_mode": "FULL"}
    assert ours["speculative_config"]["model"].startswith("verl_fuse_speculation")
    assert engine.arguments_of("ngram", tmp_path)["speculative_config"]["method"] == "ngram_gpu"
    with pytest.raises(ValueError, match=r"arm fast: needs one of stock, history"):
        engine.arguments_of("fast", tmp_path)
    command = [sys.executable, "-m", "ci.gpu.engine", "--model", str(tmp_path), "--out", str(tmp_path / "out")]
    command += ["--device", "cpu", "--arms", "fast"]
    done = subprocess.run(command, cwd=made.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "fast failed, see" in done.stderr
    assert "needs one of stock" in (tmp_path / "out" / "engine-fast.log").read_text()
