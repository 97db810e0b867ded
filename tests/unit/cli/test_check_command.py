"""`verl-fuse check`: what the preset does for arguments, scripts and YAML files of verl, as text and JSON."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from verl_fuse.cli.main import main

pytest.importorskip("hydra")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
COMMON = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=256",
    f"{ACTOR}.ppo_mini_batch_size=64",
    f"{ACTOR}.use_dynamic_bsz=true",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.n=8",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
)
ON = [
    "interstage.enabled",
    "elastic.enabled",
    "update.skip_zero_gradient",
    "update.balance",
    "update.share_prompts",
    "update.response_logits",
]
BY_SAMPLES = (f"{ACTOR}.ppo_micro_batch_size_per_gpu=2", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=2")
ONE_BATCH = (f"{ACTOR}.ppo_mini_batch_size=256",)
ONE_REPLICA = ("trainer.n_gpus_per_node=2",)
KL = f"{ACTOR}.use_kl_loss=true"
PASTE = ["+fuse=default", "trainer.v1.trainer_mode=fuse", "fuse.preset=fast"]
TRIED = {
    "interstage.enabled",
    "elastic.enabled",
    "pipeline.enabled",
    "speculation.enabled",
    "update.skip_old_log_prob",
    "update.skip_zero_gradient",
    "update.skip_values",
    "update.balance",
    "update.share_prompts",
    "update.response_logits",
}
RUN = "python3 -m verl.trainer.main_ppo"
HEAVY = ("torch", "verl", "ray", "vllm", "transformers")


@pytest.fixture
def said(capsys):
    """Run the command; return (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[object, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["check", *map(str, arguments)])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return run


@pytest.fixture
def found(said):
    """Run the command with --json; return its object."""

    def run(*arguments: str) -> dict:
        code, out, err = said("--json", *arguments)
        assert code == 0, err
        assert out.count("\n") == 1
        return json.loads(out)

    return run


def test_what_is_on_what_not_why_and_what_unlocks_it(found):
    report = found("--", *COMMON)
    assert report["on"] == ON
    assert report["paste"] == PASTE
    assert report["problems"] == report["unknown"] == []
    assert set(report["off"]) == TRIED - set(report["on"])
    assert report["takes"].keys() == {"interstage.enabled"}
    (one,) = report["off"]["update.skip_old_log_prob"]
    assert one == (
        "with fuse.interstage old log-probs are computed while other samples generate, and the update replaces that "
        "pass only with one mini-batch a step; without fuse.interstage it saves the first mini-batch's part"
    )
    assert report["unlock"] == {}
    assert set(report) == {"on", "off", "unlock", "paste", "takes", "problems", "unknown"}


@pytest.mark.parametrize("switch", ["update.skip_old_log_prob", "update.skip_zero_gradient"])
def test_what_unlocks_a_feature_switches_it_on(found, switch: str):
    asked = (*COMMON, *ONE_REPLICA, f"{ACTOR}.shuffle=true", KL)
    unlock = found("--", *asked)["unlock"][switch]
    if switch == "update.skip_old_log_prob":
        assert unlock == [f"{ACTOR}.shuffle=false"]
    assert switch in found("--", *asked, *unlock)["on"]


def test_keys_that_the_run_adds_are_unlocked_by_keys_that_are_added(found):
    draft = f"{ROLLOUT}.engine_kwargs.vllm.scheduler_cls"
    report = found("--", *COMMON, f"+{draft}=mine.Scheduler")
    assert report["off"]["speculation.enabled"][0].startswith(f"{draft}='mine.Scheduler'")
    # Without it, drafts are left out for a measurement.
    assert "speculation.enabled" not in report["unlock"]
    report = found("--", *COMMON, *ONE_BATCH, f"++{ACTOR}.use_kl_loss=true", f"+{ACTOR}.qat.enable=true")
    assert report["unlock"]["update.skip_zero_gradient"] == [f"++{ACTOR}.use_kl_loss=false"]


def test_a_feature_that_nothing_unlocks_has_reasons_alone(found):
    report = found("--", *COMMON, *ONE_BATCH, f"{ACTOR}.policy_loss.loss_mode=gpg")
    for switch, reasons in report["off"].items():
        assert reasons
        assert switch not in report["unlock"] or all("=" in line for line in report["unlock"][switch])
    assert report["off"]["pipeline.enabled"] == ["there is no critic"]
    assert "update.skip_zero_gradient" not in report["unlock"]


def test_nothing_on_is_exit_code_0_and_nothing_to_paste(said, found):
    fused = "actor_rollout_ref.model.use_fused_kernels=true"
    one = ("trainer.n_gpus_per_node=1", f"{ROLLOUT}.tensor_model_parallel_size=1")
    alone = (*COMMON, f"{ROLLOUT}.name=sglang", *one, KL, fused, f"{ACTOR}.shuffle=true")
    report = found("--", *alone)
    assert (report["on"], report["paste"]) == ([], [])
    code, out, _ = said("--", *alone)
    assert code == 0
    assert "switches on: nothing" in out
    assert "Paste" not in out


def test_unknown_keys_and_arguments_that_hydra_refuses_end_nothing(found):
    odd = (
        "reward_model.no_such_key=1",
        "async_training.staleness=0.5",
        f"{ACTOR}.strategy.deeper=1",
        "+trainer.nnodes=2",
        "~trainer.no_such",
        "data.train_files=<your path>",
        "trainer.total_epochs=1,2",
        "reward_model.no_such_key=2",
    )
    report = found("--", *COMMON, *odd)
    assert report["unknown"] == ["reward_model.no_such_key", "async_training.staleness", f"{ACTOR}.strategy.deeper"]
    assert report["on"] == ON, "strategy is still fsdp"
    assert [problem.partition(":")[0] for problem in report["problems"]] == [
        "data.train_files=<your path>",
        "+trainer.nnodes=2",
        "~trainer.no_such",
        "trainer.total_epochs=1,2",
    ]


@pytest.mark.parametrize(
    ("argument", "key"),
    [
        ("trainer.n_gpus_per_node=many", "trainer.n_gpus_per_node='many'"),
        ("trainer.use_v1=false", "trainer.use_v1=false"),
        ("trainer.device=npu", "trainer.device='npu'"),
    ],
)
def test_what_bars_the_whole_run_is_the_reason_against_every_feature(found, argument: str, key: str):
    report = found("--", *COMMON, argument)
    assert (report["on"], report["paste"]) == ([], [])
    assert set(report["off"]) == TRIED
    assert all(reasons[0].startswith(key) for reasons in report["off"].values())
    assert any(problem.startswith(key) for problem in report["problems"])


def test_an_asynchronous_run_is_not_made_synchronous_but_told_how(found):
    report = found("--", *COMMON, "trainer.v1.trainer_mode=colocate_async")
    assert report["on"] == []
    assert report["off"]["elastic.enabled"] == [
        "trainer.v1.trainer_mode='colocate_async': fuse.elastic.enabled=true needs trainer.v1.trainer_mode=fuse"
    ]
    assert report["unlock"]["elastic.enabled"] == ["trainer.v1.trainer_mode=fuse"]
    assert found("--", *COMMON, "trainer.v1.trainer_mode=sync")["on"] == ON


def test_one_reason_against_several_features_is_said_once(found, said):
    arguments = ("--", *COMMON, "trainer.v1.trainer_mode=colocate_async")
    report = found(*arguments)
    alike = [name for name, why in report["off"].items() if "needs trainer.v1.trainer_mode=fuse" in why[0]]
    unlocked = [name for name in alike if report["unlock"].get(name)]
    _, out, err = said(*arguments)
    out = " ".join(out.split())
    assert "trainer_mode=colocate_async trains on samples of older weights: verl-fuse leaves such runs" in err
    assert len(alike) > len(unlocked) > 3
    assert f"without {', '.join(unlocked)}: trainer.v1.trainer_mode='colocate_async': needs trainer" in out
    assert "with trainer.v1.trainer_mode=fuse each can be on (other training" in out


def test_keys_of_fuse_that_the_run_has_win_and_are_not_pasted_again(found):
    report = found("--", *COMMON, "+fuse=default", "fuse.elastic.enabled=false")
    assert report["on"] == [switch for switch in ON if switch != "elastic.enabled"]
    assert "elastic.enabled" not in report["off"]
    assert report["paste"] == PASTE[1:]
    assert found("--", *COMMON, "fuse.elastic.enabled=false")["on"] == report["on"]


def test_the_text_names_all_of_it_and_marks_another_training(said):
    code, out, _ = said("--", *COMMON, KL, "trainer.test_frec=1", "actor_rollout_ref.model.use_liger=true")
    out = " ".join(out.split())
    assert code == 0
    assert f"fuse.preset=fast switches on: {', '.join([*ON[:2], 'update.balance'])} with fuse.interstage." in out
    gone = "Not in verl 0.9.1's YAML, and left out here (verl refuses them as arguments without a +): trainer.test_frec"
    assert out.startswith(gone), "what is left out comes first"
    assert "trainer.test_frec (did you mean 'test_freq'?) fuse.preset" in out
    assert "with fuse.interstage.layout=slices fuse.interstage.migration_threshold=auto interstage.enabled takes" in out
    assert "takes host memory: on each node 4 replicas keep copies of actor and reference, 4 bytes a" in out
    assert "without pipeline.enabled, update.skip_values: there is no critic without speculation" in out
    assert f"with {ACTOR}.use_kl_loss=false it is on (other training: {ACTOR}.use_kl_loss)" in out
    kernels = "with actor_rollout_ref.model.use_liger=false each can be on Paste"
    assert kernels in out, "other kernels are no other training"
    assert out.endswith(
        f"Paste: {' '.join(PASTE)} For verl-fuse compare, both runs also need: 'trainer.logger=[console,wandb,file]' "
        "and in the environment: VERL_FILE_LOGGER_PATH=RUN_DIR/metrics.jsonl, after mkdir -p RUN_DIR, "
        "each with a RUN_DIR of its own (of a job of Ray, in its runtime environment) "
        "To predict the gain, and that of other sets: verl-fuse simulate h100 -- ARGUMENTS"
    )


def test_the_preset_that_the_run_chooses_is_answered_and_a_wrong_one_named(said, found):
    code, out, _ = said("--", *COMMON, "fuse.preset=safe")
    assert (code, out.startswith("fuse.preset=safe switches on: elastic.enabled")) == (0, True)
    assert found("--", *COMMON, "+fuse=default", "fuse.preset=safe")["paste"] == PASTE[1:2]
    assert found("--", *COMMON, "fuse.preset=observe")["paste"] == PASTE
    assert "Were that mended, fuse.preset=fast switches on: " in said("--", *COMMON, "fuse.preset=fst")[1]
    report = found("--", *COMMON, "fuse.preset=fst")
    assert report["problems"] == ["fuse.preset='fst': allowed: observe, safe, fast (did you mean 'fast'?)"]
    assert (report["on"], report["paste"]) == (ON, [])


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        (
            "algorithm.adv_estimator=grop",
            r"algorithm\.adv_estimator='grop': not registered in verl \(did you mean 'grpo'",
        ),
        (
            f"{ROLLOUT}.name=vllmm",
            r"actor_rollout_ref\.rollout\.name='vllmm': not registered in verl \(did you mean 'vllm'",
        ),
        ("trainer.v1.trainer_mode=fues", r"trainer_mode='fues': not registered in verl \(did you mean 'fuse'"),
        ("data.train_batch_size=32", r"ppo_mini_batch_size=64: needs at most data\.train_batch_size=32"),
    ],
)
def test_what_a_start_refuses_is_not_pasted(changed: str, problem: str, found, tmp_path: Path):
    # verl fills up what is cut by tokens.
    asked = [*(one for one in COMMON if "use_dynamic_bsz" not in one), *BY_SAMPLES]
    report = found("--", *asked, changed)
    assert [one for one in report["problems"] if re.search(problem, one)]
    assert report["paste"] == []
    assert found("--", *asked)["problems"] == []
    file = tmp_path / "run.sh"
    key = changed.partition("=")[0]
    others = [one for one in asked if not one.startswith(f"{key}=")]
    file.write_text(f"{RUN} {' '.join(others)} {key}=$OPEN")
    assert not [one for one in found("--script", file)["problems"] if re.search(problem, one)], "the value is not told"
    file.write_text(f"python3 -m mine.main_ppo {' '.join(others)} {changed}")
    assert not [one for one in found("--script", file)["problems"] if re.search(problem, one)], (
        "a main program of one's own"
    )


def test_a_plan_is_left_out_of_the_answer_and_of_what_is_pasted(found, said):
    planned = (*COMMON, "+fuse=default", "fuse.plan=plan.json")
    report = found("--", *planned)
    assert (report["on"], report["problems"]) == (ON, [])
    assert report["paste"] == [*PASTE[1:], "fuse.plan=null"]
    note = "fuse.plan=plan.json: a plan says itself what is switched on; this is fast's answer"
    assert note in said("--", *planned)[2]


def test_an_engine_that_is_not_given_is_told(said):
    name = f"{ROLLOUT}.name"
    given = [one for one in COMMON if not one.startswith(f"{name}=")]
    assert f"{name} is not given, and verl has no default" in said("--", *given)[2]
    assert name not in said("--", *given, f"{name}=vllm")[2]
    # The variables of a cluster are not set where a run is checked.
    assert name in said("--", *given, "trainer.default_local_dir='${oc.env:NO_SUCH_VARIABLE}/x'")[2]


def test_the_switch_of_the_environment_is_told(said, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_FUSE", "off")
    code, out, err = said("--", *COMMON)
    assert (code, "VERL_FUSE=off is set here: a run started with it is stock verl's" in err) == (0, True)
    assert "Paste: " in out
    monkeypatch.delenv("VERL_FUSE")
    assert "VERL_FUSE" not in said("--", *COMMON)[2]


def test_a_key_below_fuse_that_is_not_there_refuses_the_run_and_is_named_with_the_nearest(said):
    _, out, _ = said("--", *COMMON, "fuse.update.skip_zero_gradeint=true")
    assert "(did you mean 'skip_zero_gradient'?)" in " ".join(out.split())
    assert "The run is refused:" in out
    assert "Paste" not in out
    assert "Not in verl" not in out


SCRIPT = f"""
set -x
MODEL=${{MODEL:-Qwen/Qwen3-8B}}
TP=${{TP:-2}}
DATA=(
    data.train_files="['$HOME/a.parquet']"   # comments may be there
    data.train_batch_size=$((64 * 4))
)
python3 -m verl.trainer.main_ppo \\
    --config-name='ppo_trainer.yaml' \\
    "${{DATA[@]}}" \\
    {COMMON[0]} {COMMON[2]} {COMMON[3]} {COMMON[4]} {COMMON[5]} \\
    {ROLLOUT}.tensor_model_parallel_size=$TP \\
    actor_rollout_ref.model.path=$MODEL \\
    trainer.n_gpus_per_node=$GPUS \\
    trainer.experiment_name=$NAME-$(date +%F) \\
    $EXTRA "$@" 2>&1 | tee train.log
"""


def test_a_preset_that_the_script_does_not_define_is_no_wrong_preset(found, said, tmp_path: Path):
    file = tmp_path / "run.sh"
    line = " ".join([*COMMON, *ONE_BATCH, "+fuse=default", "trainer.v1.trainer_mode=fuse", "fuse.preset=$PRESET"])
    file.write_text(f"python -m verl.trainer.main_ppo {line}\n")
    report = found("--script", file)
    assert (report["problems"], report["unset"], report["paste"]) == (
        [],
        {"PRESET": ["fuse.preset"]},
        ["fuse.preset=fast"],
    )
    _, _, err = said("--script", file)
    assert "fuse.preset=$PRESET: the script does not define PRESET; allowed: observe, safe, fast" in err


def test_a_script_is_read_with_its_own_arguments(found, said, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    report = found("--script", file)
    assert (report["on"], report["unknown"], report["problems"]) == (ON, [], [])
    assert report["unset"] == {
        "GPUS": ["trainer.n_gpus_per_node"],
        "NAME": ["trainer.experiment_name"],
        "$(date +%F)": ["trainer.experiment_name"],
        "EXTRA": ["$EXTRA"],
    }
    _, out, err = said("--script", file)
    assert "trainer.n_gpus_per_node=$GPUS: the script does not tell the value; verl's, 8, is taken" in err
    assert "The script does not tell GPUS: trainer.n_gpus_per_node" in out
    assert found("--script", file, "--", *ONE_BATCH)["on"] == [
        "elastic.enabled",
        "update.skip_old_log_prob",
        "update.skip_zero_gradient",
        "update.share_prompts",
        "update.response_logits",
    ]
    monkeypatch.setenv("GPUS", "2")
    assert found("--script", file)["on"] == ["update.skip_old_log_prob", *ON[2:]], "one replica"
    assert "GPUS" not in found("--script", file)["unset"]


def test_arguments_of_a_script_that_passes_none_on_are_overrides(found, tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT.replace(' "$@"', ""))
    assert "update.skip_old_log_prob" in found("--script", file, "--", *ONE_BATCH)["on"]


def test_a_configuration_beside_the_script_is_composed(found, said, tmp_path: Path):
    config = tmp_path / "examples" / "config"
    config.mkdir(parents=True)
    (config / "mine.yaml").write_text(
        "hydra:\n  searchpath:\n    - file://verl/trainer/config\ndefaults:\n  - ppo_trainer\n  - _self_\n"
        "actor_rollout_ref:\n  rollout:\n    name: sglang\n"
    )
    file = tmp_path / "examples" / "scripts" / "run.sh"
    file.parent.mkdir()
    command = "python3 -m verl.trainer.main_ppo --config-path=$(pwd)/examples/config --config-name {} {}\n"
    file.write_text(command.format("mine", " ".join(set(COMMON) - {f"{ROLLOUT}.name=vllm"})))
    report = found("--script", file)
    assert report["off"]["elastic.enabled"][0].startswith(f"{ROLLOUT}.name='sglang'")
    file.write_text(command.format("gone", ""))
    code, out, err = said("--script", file)
    assert (code, out) == (2, "")
    assert "--config-name gone: gone.yaml is neither of verl" in err


def test_yaml_is_composed_or_merged_into_verl_s(found, tmp_path: Path):
    values = OmegaConf.from_dotlist([*COMMON, "trainer.no_such=1", "actor_rollout_ref.model.override_config.x=1"])
    plain, whole = tmp_path / "plain.yaml", tmp_path / "whole.yaml"
    plain.write_text(OmegaConf.to_yaml(values))
    defaults = {"hydra": {"searchpath": ["pkg://verl.trainer.config"]}, "defaults": ["ppo_trainer", "_self_"]}
    whole.write_text(OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(defaults), values)))
    expected = found("--", *COMMON)
    for file in (plain, whole):
        report = found("--script", file)
        assert report["unknown"] == ["trainer.no_such"]
        assert {**report, "unknown": []} == expected
        assert "update.skip_old_log_prob" in found("--script", file, "--", *ONE_BATCH)["on"]
    OmegaConf.update(values, f"{ACTOR}.strategy", "megatron")
    plain.write_text(OmegaConf.to_yaml(values))
    assert "update.skip_zero_gradient" in found("--script", plain)["on"]
    values = OmegaConf.from_dotlist([f"{ACTOR}.megatron.tensor_model_parallel_size=2"])
    for primary, unknown in (
        (["ppo_trainer", "_self_", {"override model_engine": "megatron"}], []),
        (["ppo_trainer", "_self_", {"override model_engine": "dp"}], [f"{ACTOR}.megatron"]),
        (["ppo_megatron_trainer", "_self_"], []),
    ):
        defaults["defaults"] = primary
        whole.write_text(OmegaConf.to_yaml(OmegaConf.merge(OmegaConf.create(defaults), values)))
        assert found("--script", whole)["unknown"] == unknown


def test_a_choice_of_fuse_in_a_configuration_is_not_pasted_again(found, tmp_path: Path):
    mine = tmp_path / "mine.yaml"
    start = "hydra: {searchpath: ['pkg://verl.trainer.config']}\ndefaults: [ppo_trainer, fuse: default, _self_]\n"
    mine.write_text(start)
    for given in (("--script", mine, "--"), ("--", "--config-path", tmp_path, "--config-name", "mine")):
        assert found(*given, *COMMON)["paste"] == PASTE[1:]


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("run.sh", "echo", "run.sh: there is no command of verl.trainer.main_ppo"),
        ("run.sh", f"{RUN} a.b=1\n{RUN} a.b=2", "lines 1 and 2 each start verl.trainer.main_ppo"),
        ("run.sh", f"{RUN} 'a", "run.sh: line 1: the quote ' has no end"),
        ("run.yaml", "a: [1", "run.yaml: not YAML"),
        ("run.yaml", "- 1", "run.yaml: needs a block of verl's keys"),
        ("run.yaml", "defaults:\n  - no_such_thing", "Could not load 'no_such_thing'"),
        ("README.md", f"Run `{RUN}`, it isn't hard.", "README.md: needs a shell script that starts verl.trainer"),
        ("gone.sh", None, "gone.sh: cannot be read: No such file"),
    ],
)
def test_what_cannot_be_read_is_refused(said, tmp_path: Path, name: str, text: str | None, says: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    code, out, err = said("--script", tmp_path / name)
    assert (code, out) == (2, "")
    assert says in err


def test_it_needs_something_to_read(said):
    code, _, err = said()
    assert code == 2
    assert "check needs arguments of verl.trainer.main_ppo behind --, or --script FILE" in err
    code, _, err = said(__file__)
    assert (code, f"is a file: give it as --script {__file__}" in err) == (2, True)
    code, _, err = said("--", "no override")
    assert code == 2
    assert "override 'no override' cannot be read" in err


def test_a_whole_command_is_taken_for_its_arguments(found):
    assert found("--", "python3", "-m", "verl.trainer.main_ppo", *COMMON) == found("--", *COMMON)


def test_neither_torch_nor_verl_nor_ray_is_imported():
    code = (
        "import json, sys\nfrom verl_fuse.cli.main import main\n"
        f"try:\n    main(['check', '--json', '--', *{COMMON!r}])\n"
        f"except SystemExit as end:\n    print(json.dumps([end.code, [m for m in {HEAVY!r} if m in sys.modules]]))\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ)
    assert json.loads(out.stdout.splitlines()[-1]) == [0, []]


def test_the_keys_of_json_are_documented(documented_keys, found, tmp_path: Path):
    file = tmp_path / "run.sh"
    file.write_text(SCRIPT)
    assert set(found("--script", file)) == documented_keys["check"]


def test_a_whole_command_as_one_argument_is_an_argument_that_verl_has_not(capsys):
    """Longer than a file name may be."""
    with pytest.raises(SystemExit) as ended:
        main(["check", "--", f"python3 -m verl.trainer.main_ppo {'data.train_batch_size=256 ' * 20}"])
    assert ended.value.code in (0, 2)


def test_the_command_that_predicts_is_that_of_the_script_with_its_arguments(tmp_path, capsys):
    script = tmp_path / "my run.sh"
    script.write_text("python3 -m verl.trainer.main_ppo " + " ".join(COMMON))
    with pytest.raises(SystemExit):
        main(["check", "--script", str(script), "--", "trainer.nnodes=2"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"verl-fuse simulate h100 --script '{script}' -- trainer.nnodes=2" in shown
