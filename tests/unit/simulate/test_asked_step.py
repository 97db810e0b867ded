"""A launched run is read as a step to simulate, and `simulate` and `check` answer alike for it."""

import json
import re
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse import plugins
from verl_fuse.cli.asked_step import asked_step
from verl_fuse.cli.main import main
from verl_fuse.errors import FuseError
from verl_fuse.plan.overrides import workload_overrides
from verl_fuse.spec.composed import ACTOR, ROLLOUT, getter
from verl_fuse.spec.model_names import model_of_path

pytest.importorskip("verl")

QWEN = "actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct"
COMMON = (
    QWEN,
    "algorithm.adv_estimator=grpo",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=2",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=4",
    f"{ROLLOUT}.gpu_memory_utilization=0.6",
    "actor_rollout_ref.model.use_remove_padding=true",
    "data.train_batch_size=256",
    "data.max_prompt_length=1024",
    "data.max_response_length=3072",
    "trainer.nnodes=2",
)
PURE = (*COMMON, f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.ppo_mini_batch_size=256", f"{ACTOR}.strategy=fsdp2")
PPO = (
    *(QWEN, "algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", f"{ACTOR}.ppo_mini_batch_size=128"),
    *(f"{ACTOR}.ppo_epochs=2", "data.train_batch_size=512", "critic.ppo_micro_batch_size_per_gpu=4"),
    "critic.model.path=meta-llama/Llama-3.2-3B",
    "actor_rollout_ref.model.use_remove_padding=false",
)
TRANSFORMER = f"{ACTOR}.megatron.override_transformer_config"


@pytest.mark.parametrize("arguments", [COMMON, PURE, PPO])
def test_the_workload_has_the_values_of_the_run(arguments: tuple[str, ...]):
    step = asked_step(["h100", *arguments], None, {})
    for key, value in workload_overrides(step.workload).items():
        assert OmegaConf.select(step.config, key) == value, key
    assert step.workload.actor.name == "qwen2.5-7b"


def test_what_a_launch_tells_of_models_devices_and_options():
    step = asked_step(["h100", *COMMON], None, {})
    assert (step.cluster.nodes, step.cluster.devices, step.cluster.device.name) == (2, 16, "H100")
    told = {"rollout_tp": 4, "rollout_memory": 0.6, "padded": False, "engine": "fsdp", "recompute": True}
    assert {name: step.options[name] for name in told} == told
    assert step.assumed.keys() == {"prompt", "response", "zero_gradient"}
    assert step.workload.response.maximum == 3072
    ppo = asked_step(["h100", *PPO], None, {})
    assert ppo.workload.critic
    assert ppo.workload.critic.name.startswith("llama-3.2-3b")
    assert (ppo.workload.epochs, ppo.workload.kl_term, ppo.options["padded"]) == (2, "reward", True)
    assert "critic" in asked_step(["h100", *PPO, "critic.model.path=/models/mine"], None, {}).assumed


@pytest.mark.parametrize(
    ("arguments", "recomputed"),
    [
        (("actor_rollout_ref.model.enable_gradient_checkpointing=false",), False),
        (("model_engine=megatron",), False),
        (("model_engine=megatron", f"{TRANSFORMER}.recompute_granularity=full"), True),
    ],
)
def test_activations_are_computed_again_as_the_run_s_engine_does(arguments: tuple[str, ...], recomputed: bool):
    assert asked_step(["h100", *COMMON, *arguments], None, {}).options["recompute"] is recomputed


@pytest.mark.parametrize(
    ("arguments", "share", "idle"),
    [
        ((), 0.2, ""),
        (("algorithm.adv_estimator=reinforce_plus_plus_baseline",), 0.0, "advantages are whitened"),
        (("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=reward"), 0.0, "groups of equal"),
        (("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=acc"), 0.0, ""),
    ],
)
def test_samples_are_without_a_gradient_only_where_advantages_can_be_0(
    arguments: tuple[str, ...], share: float, idle: str
):
    step = asked_step(["h100", *COMMON, *arguments], None, {})
    assert (step.workload.zero_gradient, "zero_gradient" in step.assumed) == (share, share > 0)
    (feature,) = [one for name, one in plugins.features(plugins.load()).items() if name == "zero_gradient"]
    assert (feature.idle(getter(step.config)) or "").startswith(idle)
    assert (feature.idle(getter(step.config)) is None) == (not idle)


@pytest.mark.parametrize(
    ("path", "alike"),
    [
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", "qwen2.5-7b"),
        ("Qwen/Qwen3.5-4B", "qwen3-4b"),
        ("a/b-8B-SFT", "qwen3-8b"),
    ],
)
def test_a_model_of_another_family_is_taken_to_be_like_one_of_its_size(path: str, alike: str):
    step = asked_step(["h100", *COMMON, f"actor_rollout_ref.model.path={path}"], None, {})
    assert (step.workload.actor.name, step.assumed["actor"]) == (alike, alike)


@pytest.mark.parametrize(("size", "minibatches"), [(256, 1), (512, 1), (64, 4), (86, 4), (255, 2), (100, 4)])
def test_mini_batches_are_equal_ones(size: int, minibatches: int):
    step = asked_step(["h100", *COMMON, f"{ACTOR}.ppo_mini_batch_size={size}"], None, {})
    assert (step.workload.minibatches, "minibatches" in step.assumed) == (minibatches, size in (86, 100))


@pytest.mark.parametrize(
    ("argument", "told"),
    [
        (f"{ROLLOUT}.n=[8", rf"{ROLLOUT}\.n=\[8: left out: "),
        (f"{ROLLOUT}.nn=8", rf"left out, not in verl's YAML: {ROLLOUT}\.nn"),
        ("actor_rollout_ref.model.lora_rank=32", r"adapters \(LoRA\) are simulated as the training of all weights"),
        (f"{ROLLOUT}.tensor_model_parallel_size=16", "the fastest of 1, 2, 4, 8 within a node is simulated"),
        ("algorithm.filter_groups.enable=true", "groups that are discarded are not simulated"),
        (f"{ACTOR}.ulysses_sequence_parallel_size=2", rf"fastest that fit, not the run's cp2 of {ACTOR}"),
        (f"{ACTOR}.fsdp_config.fsdp_size=8", rf"fastest that fit, not the run's fsdp_size=8 of {ACTOR}"),
        (f"{ACTOR}.fsdp_config.optimizer_offload=true", rf"{ACTOR}\.fsdp_config\.optimizer_offload=true is not simul"),
        (f"{ROLLOUT}.data_parallel_size=2", rf"{ROLLOUT}\.data_parallel_size=2 is not simulated"),
    ],
)
def test_what_is_left_out_of_a_launch_is_told(argument: str, told: str):
    step = asked_step(["h100", *COMMON, argument], None, {})
    assert re.search(told, "\n".join([*step.notes, *step.not_modelled]))
    assert asked_step(["h100", *COMMON], None, {}).notes == ()


def test_layouts_and_devices_that_are_not_simulated_are_told():
    common = asked_step(["h100", *COMMON], None, {}).not_modelled
    assert common == ("micro-batches are the fastest that fit, not the run's",)
    tp, pp = (f"{ACTOR}.megatron.{kind}_model_parallel_size" for kind in ("tensor", "pipeline"))
    reward = ("reward.reward_model.enable=true", "reward.reward_model.enable_resource_pool=true")
    model = ("reward.reward_model.model_path=Qwen/Qwen2.5-7B-Instruct", "reward.reward_model.rollout.name=vllm")
    words = ["h100", *COMMON, "model_engine=megatron", f"{tp}=2", f"{pp}=4", *reward, *model]
    found = asked_step(words, None, {}).not_modelled
    assert f"layouts of training are the fastest that fit, not the run's tp2 pp4 of {ACTOR}" in found
    assert "reward.reward_model.enable_resource_pool=true: its devices are not simulated" in found


def test_a_script_that_does_not_tell_a_value_is_told(tmp_path: Path):
    script = tmp_path / "run.sh"
    script.write_text(f"python3 -m verl.trainer.main_ppo {' '.join(COMMON)} data.train_batch_size=$SIZE")
    notes = "\n".join(asked_step(["h100"], script, {}).notes)
    assert "the script does not tell SIZE: data.train_batch_size" in notes


def test_what_the_launch_tells_is_not_set_beside_it():
    with pytest.raises(FuseError, match=r"--set step\.minibatches: of a launched run allowed: actor, .*its arguments"):
        asked_step(["h100", *COMMON], None, {"minibatches": 2})


def test_keys_of_the_command_take_the_place_of_the_runs():
    given = {"actor": "qwen3-8b", "response": "fixed:100", "zero_gradient": 0.25}
    step = asked_step(["h100", *COMMON, "actor_rollout_ref.model.path=/models/mine"], None, given)
    assert (step.workload.actor.name, step.workload.reference) == ("qwen3-8b", step.workload.actor)
    assert (step.workload.response.maximum, step.workload.zero_gradient) == (100, 0.25)
    assert step.assumed.keys() == {"prompt"}
    with pytest.raises(
        FuseError, match=r"--set step\.respons \(did you mean 'response'\?\): of a launched run allowed"
    ):
        asked_step(["h100", *COMMON], None, {"respons": 900})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-Math-7B", "qwen2.5-7b"),
        ("/models/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Llama-2-7b-hf", "llama-2-7b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", None),
        ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", None),
        ("", None),
        (None, None),
    ],
)
def test_the_size_of_a_model_is_in_its_name(path: str | None, name: str | None):
    assert model_of_path(path) == name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["h100", *COMMON, "fuse.preset=fst"], "fuse.preset='fst': allowed: observe, safe, fast"),
        (["h100", *COMMON, "trainer.use_v1=false"], "nothing of verl-fuse fits this run: trainer.use_v1=false"),
        (["h100", *COMMON, "trainer.save_freq=abc"], "nothing of verl-fuse fits this run: trainer.save_freq='abc'"),
        (
            ["h100", *COMMON, "trainer.v1.trainer_mode=separate_async"],
            "a step of it is not simulated; needs sync, or fuse",
        ),
        (["h100", *COMMON, "actor_rollout_ref.model.path=x/y"], r"model\.path='x/y': neither .*--set step\.actor=PATH"),
        (["h100", *COMMON, "trainer.nnodes=0"], "trainer.nnodes=0: needs a whole number >= 1"),
        (["h100x4", *COMMON], "CLUSTER has 4 nodes, and trainer.nnodes=2: name the kind of device alone"),
        ([QWEN, *COMMON], "needs CLUSTER first"),
        (["h100"], "needs WORKLOAD.yaml and CLUSTER, or CLUSTER with --script FILE"),
    ],
)
def test_what_cannot_be_read_is_named(words: list[str], message: str):
    with pytest.raises(FuseError, match=message):
        asked_step(words, None, {})


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(list(words))
    return int(stop.value.code or 0)


@pytest.mark.parametrize("arguments", [COMMON, PURE])
def test_simulate_answers_as_check_does(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    def asked(*words: str):
        assert run(*words) == 0
        return json.loads(capsys.readouterr().out)

    checked = asked("check", "--json", "--", *arguments)
    script = tmp_path / "run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " \\\n  ".join(arguments))
    simulated = asked("simulate", "h100", "--script", str(script), "--seeds", "1", "--json")
    rows = {row["strategy"]: row for row in simulated["strategies"]}
    on = next(note for note in rows["fast"]["notes"] if note.startswith("fuse.preset=fast switches on "))
    assert on.partition(";")[0].removeprefix("fuse.preset=fast switches on ").split(", ") == checked["on"]
    for name, feature in plugins.features(plugins.load()).items():
        if not feature.presets or not feature.strategy or feature.strategy == "speculation":
            continue
        assert (name in rows) is (name not in simulated["without"])
        # A feature that gives way to another one of the preset is open.
        refused = feature.switch in checked["off"] and feature.switch in checked["unlock"]
        assert not (feature.switch in checked["on"] and name in simulated["without"])
        assert not (refused and name in rows)
    assert rows["fast"]["seconds"]["mean"] < rows["observe"]["seconds"]["mean"]
    assert simulated["rollout_tp"]


def test_the_preset_is_pasted_where_it_does_as_much_as_single_features(capsys: pytest.CaptureFixture[str]):
    assert run("check", "--", *COMMON, "trainer.logger=[console,wandb]") == 0
    shown = capsys.readouterr().out
    paste = next(line for line in shown.splitlines() if line.startswith("Paste: "))
    assert "trainer.logger=[console,wandb,file]" in shown
    assert "To predict the gain, and that of other sets: verl-fuse simulate h100 -- ARGUMENTS" in shown
    assert run("simulate", "h100", "--seeds", "1", "--", *COMMON) == 0
    assert capsys.readouterr().out.splitlines()[-1] == paste
    assert run("simulate", "h100", "--seeds", "1", "--strategy", "fast", "--", *COMMON) == 0
    text = " ".join(capsys.readouterr().out.split())
    verdict = r"Verdict: fuse\.preset=fast is \d\.\d\d times as fast as stock; no feature was simulated alone"
    assert re.search(rf"{verdict} \(--strategy\)\. {re.escape(paste)}$", text)
    assert "switch no feature on" not in text


def test_a_preset_is_priced_with_its_metrics(capsys: pytest.CaptureFixture[str]):
    def seconds(*changes: str) -> float:
        asked = ("simulate", "h100", "--seeds", "1", "--strategy", "safe", "--json")
        assert run(*asked, "--", *PURE, "fuse.preset=safe", *changes) == 0
        rows = json.loads(capsys.readouterr().out)["strategies"]
        return next(row["seconds"]["mean"] for row in rows if row["strategy"] == "safe")

    assert seconds() > seconds("fuse.update.metrics=computed")


def test_a_run_that_cannot_start_is_simulated_and_nothing_is_pasted(capsys: pytest.CaptureFixture[str]):
    asked = ("simulate", "h100", "--seeds", "1", "--strategy", "fast")
    refused = (*COMMON, f"{ROLLOUT}.tensor_model_parallel_size=3")
    problem = "actor_rollout_ref.rollout.tensor_model_parallel_size=3: a replica has 3 devices: needs a divisor of the"
    assert run(*asked, "--", *refused) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"The run cannot start: {problem} run's 16" in text
    assert "not simulated: micro-batches are the fastest that fit, not the run's" in text
    assert "paste" not in text.lower()
    assert run(*asked, "--json", "--", *refused) == 0
    found = json.loads(capsys.readouterr().out)
    assert [one.startswith(problem) for one in found["problems"]] == [True]
    assert run(*asked, "--json", "--", *COMMON, "actor_rollout_ref.model.lora_rank=8") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == []
    assert "adapters (LoRA) are simulated as the training of all weights" in found["not_modelled"]


@pytest.mark.parametrize(
    ("keys", "closed", "open_"),
    [
        ("reference: qwen2.5-0.5b", "zero_gradient", "old_log_prob"),
        ("reference: qwen2.5-0.5b\nkl: reward", "old_log_prob", "zero_gradient"),
        ("samples: 4", "values", "zero_gradient"),
    ],
)
def test_a_workload_tells_what_is_refused(
    keys: str, closed: str, open_: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "step.yaml"
    step = "algorithm: grpo\nprompts: 16\nprompt: fixed:64\nresponse: fixed:64\nactor: qwen2.5-0.5b\n"
    file.write_text(f"{step}zero_gradient: 0.4\n{keys}")
    assert run("simulate", str(file), "h100", "--seeds", "1", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    names = [row["strategy"] for row in shown["strategies"]]
    assert (closed in names, open_ in names, closed in shown["without"]) == (False, True, True)
    refused = run("simulate", str(file), "h100", "--seeds", "1", "--strategy", f"observe+{closed}")
    assert (refused, f"{closed} is refused in this step" in capsys.readouterr().err) == (2, True)
