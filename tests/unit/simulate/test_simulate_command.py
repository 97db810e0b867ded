"""`verl-fuse simulate`."""

import dataclasses
import json
import re
import shutil
import signal
from pathlib import Path

import pytest
import yaml
from synthetic_run import write_run

from verl_fuse.cli.main import main
from verl_fuse.cli.simulate import FAR_OFF
from verl_fuse.cost.profiled import ProfiledCost
from verl_fuse.cost.table import ProfileTable
from verl_fuse.simulate.compare import Comparison
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.workload import Workload
from verl_fuse.timeline.files import read_step

WORKLOAD = {
    "algorithm": "ppo",
    "prompts": 64,
    "prompt": "uniform:50-300",
    "response": "lognormal:median=200,sigma=1.0,max=1024",
    "actor": "qwen2.5-0.5b",
    "critic": "qwen2.5-0.5b",
    "reference": "qwen2.5-0.5b",
}


@pytest.fixture
def workload(tmp_path: Path) -> str:
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump(WORKLOAD))
    return str(tmp_path / "workload.yaml")


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as stop:
        main(["simulate", *arguments])
    return int(stop.value.code or 0)


@pytest.fixture(autouse=True)
def narrow(monkeypatch: pytest.MonkeyPatch):
    """Output into a pipe is whole too."""
    monkeypatch.setenv("COLUMNS", "40")


def test_a_table_of_strategies(workload: str, capsys: pytest.CaptureFixture[str]):
    assert run(workload, "h100", "--seeds", "2") == 0
    out = capsys.readouterr().out
    assert "Predicted: ppo of qwen2.5-0.5b, 64 samples, on 8 x H100; 2 steps each" in out
    page = (Path(__file__).parents[3] / "verl_fuse/cost/README.md").read_text()
    assert all(figure in FAR_OFF for figure in ("1.02", "1.61", "13 %", "2.3 and 1.9 times"))
    assert all(figure in page for figure in ("step 1.02 |", "step 1.61 |", "of steps 13 %", "took 2.3 and 1.9 times"))
    rows = [line.split("│")[1].strip() for line in out.splitlines() if line.startswith("│")]
    assert rows == [
        "stock",
        "observe",
        "streaming",
        "interstage",
        "pipeline",
        "scaling",
        "values",
        "response_logits",
        "placement",
        "advised",
    ]
    assert "without zero_gradient: a critic's advantages are hardly ever 0" in out
    assert "without old_log_prob: algorithm.use_kl_in_reward=true: " in out
    (strategy,) = re.findall(r"^advised: is (\S+)$", out, flags=re.MULTILINE)
    assert "actor_train dp8" in out
    text = " ".join(out.split())
    assert re.search(r"tensor parallelism of the rollout: (tp\d [\d.]+ s, )+tp\d [\d.]+ s; stock above has the", text)
    assert f"\nVerdict: switch on {strategy.split('+')[0]} (" in out
    assert max(map(len, out.splitlines())) <= 100


def test_what_to_switch_on_is_the_last_that_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "run", steps=3, replicas=4, requests=256)
    assert run("--from", str(tmp_path / "run"), "--set", "dedicated=true") == 0
    out = capsys.readouterr().out
    assert "Verdict: switch on interstage (0.7" in out
    assert out.endswith(
        "Overrides to paste:\n  fuse.interstage.enabled=true \\\n  fuse.interstage.layout=slices \\\n"
        "  fuse.interstage.migration_threshold=auto \\\n"
        "  fuse.update.skip_old_log_prob=true \\\n  fuse.update.metrics=computed\n"
    )
    assert max(map(len, out.splitlines())) <= 100


def test_a_run_on_cpus_is_known_to_share_its_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "run", steps=3, replicas=4, requests=256)
    (tmp_path / "run" / "config.yaml").write_text("{trainer: {device: cpu}}")
    assert run("--from", str(tmp_path / "run")) == 0
    assert "devices are shared and saturated" in capsys.readouterr().out
    assert run("--from", str(tmp_path / "run"), "--set", "dedicated=true") == 0
    assert "devices are shared and saturated" not in capsys.readouterr().out


def test_pages_as_of_a_real_run(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(workload, "h100x2", "--seeds", "1", "--strategy", "interstage", "--timeline", str(tmp_path / "out")) == 0
    assert "out/strategies.html" in capsys.readouterr().out
    page = (tmp_path / "out/strategies.html").read_text()
    assert "interstage/timeline/step_000001.html" in page
    assert "<h2>Verdict: " in page
    assert "a model of H100 by its data sheet; lengths of responses are drawn with seed 0, the same" in page
    assert (tmp_path / "out/interstage/timeline.html").is_file()
    run_name = read_step(tmp_path / "out" / "stock", 1).run
    assert run_name.startswith(
        "stock, simulated: ppo of qwen2.5-0.5b, 64 samples, on 16 x H100 (2 nodes of 8); 1 step each"
    )


def test_pages_never_take_the_place_of_a_run_that_was_made(
    workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = (workload, "h100x2", "--seeds", "1", "--strategy", "interstage", "--timeline", str(tmp_path / "runs"))
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / "runs/interstage").mkdir(parents=True)
        (tmp_path / "runs/interstage" / name).write_text("")
        assert run(*arguments) == 2
        assert (
            "runs/interstage is the folder of a run that was made: --timeline needs another" in capsys.readouterr().err
        )
        assert [path.name for path in (tmp_path / "runs").rglob("*")] == ["interstage", name]
        shutil.rmtree(tmp_path / "runs")
    assert run(*arguments) == 0
    # Its own pages are written anew.
    assert run(*arguments) == 0


def test_pages_of_all_strategies_stay_small(tmp_path: Path):
    short = {"samples": 4, "prompt": "uniform:8-12", "response": "lognormal:median=20,sigma=0.8,max=64"}
    (tmp_path / "workload.yaml").write_text(yaml.safe_dump({**WORKLOAD, **short}))
    assert run(str(tmp_path / "workload.yaml"), "h100", "--seeds", "1", "--timeline", str(tmp_path / "out")) == 0
    sizes = {path.relative_to(tmp_path): path.stat().st_size for path in tmp_path.rglob("*.html")}
    assert len(sizes) > 10
    assert {path: size for path, size in sizes.items() if size >= 50_000} == {}
    page = (tmp_path / "out/strategies.html").read_text()
    # The stages have names, and colours, of a recorded step.
    assert "fused_update: " in page
    assert "other stages" not in page


def test_options_and_a_cluster_file(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "cluster.yaml").write_text("{device: L40S, nodes: 2, devices_per_node: 4, price_per_device_hour: 0.0}")
    arguments = [
        workload,
        str(tmp_path / "cluster.yaml"),
        "--seeds",
        "1",
        "--set",
        "stock_poll=0.5",
        "--strategy",
        "stock",
    ]
    assert run(*arguments) == 0
    assert "on 8 x L40S" in capsys.readouterr().out


def test_the_commands_of_the_readme(repo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    readme = (repo / "verl_fuse/simulate/README.md").read_text()
    (example,) = re.findall(r"```yaml\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "WORKLOAD.yaml").write_text(example)
    write_run(tmp_path / "RUN_DIR", steps=2)
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^verl-fuse simulate (.*)$", readme, re.MULTILINE)
    (tmp_path / "run_grpo.sh").write_text("python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo\n")
    assert len(commands) == 4
    for command in commands:
        command = re.sub("^h100 ", "h100 --seeds 1 ", command).replace("ARGUMENTS", "algorithm.adv_estimator=grpo")
        assert run(*command.replace("--seeds 8", "--seeds 1").split()) == 0
    assert (tmp_path / "OUT" / "values" / "timeline.html").is_file()


def test_a_profile_and_a_plan(tmp_path: Path, repo: Path, capsys: pytest.CaptureFixture[str]):
    profile = repo / "tests/golden/cpu_profile.json"
    table = ProfileTable.read(profile)
    model = dataclasses.asdict(table.models[0].model)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": model["layers"],
        "hidden_size": model["hidden"], "num_attention_heads": model["heads"], "num_key_value_heads": model["kv_heads"],
        "intermediate_size": model["intermediate"], "vocab_size": model["vocabulary"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    data = {"algorithm": "grpo", "prompts": 4, "samples": 2, "prompt": "fixed:10", "response": "uniform:1-40"}
    (tmp_path / "grpo.yaml").write_text(yaml.safe_dump({**data, "actor": "config.json", "reference": "config.json"}))
    workload = Workload.read(tmp_path / "grpo.yaml")
    plan = stock_plan(workload, ProfiledCost.of(table, cluster_named("cpu")))
    plan.write(tmp_path / "plan.json")
    arguments = [str(tmp_path / "grpo.yaml"), "cpu", "--profile", str(profile), "--plan", str(tmp_path / "plan.json")]
    assert run(*arguments, "--seeds", "1") == 0
    out = capsys.readouterr().out
    assert "on 2 x CPU" in out
    assert "realloc" in out
    assert "no tail is moved: no migration is predicted to gain" in out


def test_a_recorded_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    write_run(tmp_path / "run", steps=3)
    assert run("--from", str(tmp_path / "run"), "--set", "dedicated=false") == 0
    out = capsys.readouterr().out
    assert "2 steps" in out
    assert "devices are shared and saturated" in out
    assert "Replicas are taken to have devices of their own" not in out


def test_a_recorded_run_as_json_without_its_damaged_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], documented_keys: dict[str, set[str]]
):
    write_run(tmp_path / "run", steps=3)
    (tmp_path / "run/timeline/step_000002.json").write_text("{")
    with pytest.warns(UserWarning, match=r"a recorded step is skipped: .*step_000002\.json"):
        assert run("--from", str(tmp_path / "run/timeline.html"), "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == documented_keys["simulate --from"]
    assert data["steps"] == 1
    assert {saving["feature"] for saving in data["savings"]} >= {"interstage", "scaling"}


def test_the_table_fits_a_page(workload: str, capsys: pytest.CaptureFixture[str]):
    assert run(workload, "h100x32", "--seeds", "2") == 0
    assert max(len(line) for line in capsys.readouterr().out.splitlines() if line[:1] in "┏┃│└┡") <= 100


def test_ctrl_c_shows_the_strategies_that_are_done(
    workload: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    class Interrupted(Comparison):
        def rows(self):
            for number, row in enumerate(super().rows()):
                if number == 2:
                    signal.raise_signal(signal.SIGINT)
                yield row

    monkeypatch.setattr("verl_fuse.cli.simulate.Comparison", Interrupted)
    assert run(workload, "h100", "--seeds", "1", "--json") == 130
    said = capsys.readouterr()
    shown = json.loads(said.out)
    assert [row["strategy"] for row in shown["strategies"]] == ["stock", "observe"]
    assert "advised" not in shown
    assert said.err == "verl-fuse: interrupted\n"


def test_the_advised_set_is_a_strategy_with_the_same_numbers(workload: str, capsys: pytest.CaptureFixture[str]):
    ask = (workload, "h100x4", "--seeds", "2", "--json")
    assert run(*ask) == 0
    shown = json.loads(capsys.readouterr().out)
    advised = shown["advised"]
    assert set(advised["strategy"].split("+")) == set(shown["advice"]["features"])
    assert len(shown["advice"]["features"]) > 1
    assert run(*ask, "--strategy", advised["strategy"]) == 0
    row = json.loads(capsys.readouterr().out)["strategies"][-1]
    assert {name: row[name] for name in advised} == advised


@pytest.mark.parametrize(("text", "shown"), [("2.5", "2.5 USD per device and hour"), ("0.0", "costs nothing")])
def test_costs_have_a_unit(workload: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, shown: str):
    (tmp_path / "cluster.yaml").write_text(f"{{device: H100, price_per_device_hour: {text}}}")
    for cluster, example in ((str(tmp_path / "cluster.yaml"), False), ("h100", True)):
        assert run(workload, cluster, "--seeds", "1", "--strategy", "stock") == 0
        out = " ".join(capsys.readouterr().out.split())
        assert ("(an example; set price_per_device_hour in a cluster file)" in out) is example
        assert (shown in out) is not example
        assert ("USD a step" in out) is (example or text != "0.0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "needs WORKLOAD.yaml and CLUSTER, or CLUSTER with --script FILE or -- ARGUMENTS, or --from RUN_DIR"),
        (["{w}"], "needs WORKLOAD.yaml and CLUSTER"),
        (["{w}", "h10"], "device 'h10': unknown (did you mean 'H100'?)"),
        (["{w}", "h100x0"], "cluster: nodes=0; needs a whole number >= 1"),
        (["{w}", "missing.yaml"], "missing.yaml: cannot be read"),
        (["missing.yaml", "h100"], "missing.yaml: cannot be read"),
        (["{w}", "h100", "--strategy", "fast"], "strategy='fast'; allowed: stock"),
        (["{w}", "h100", "--strategy", "realloc"], "strategy='realloc' needs --plan"),
        (
            ["{w}", "h100", "--set", "step.kl=loss", "--strategy", "pipeline+old_log_prob"],
            "pipeline and old_log_prob are refused together",
        ),
        (["{w}", "h100", "--strategy", "values+placement"], "fuse.placement.critic='auto': fuse.update.skip_values"),
        (["{w}", "h100", "--set", "poll"], "--set 'poll': needs KEY=VALUE"),
        (["{w}", "h100", "--set", "stock_pol=1"], "options.stock_pol: unknown key (did you mean 'stock_poll'?)"),
        (["{w}", "h100", "--set", "rollout_memory=2"], "options.rollout_memory=2.0: needs >= 0.01 and <= 1.0"),
        (["{w}", "h100", "--set", "stock_poll=.inf"], "options.stock_poll=inf: needs"),
        (["{w}", "h100", "--from", "x"], "--from RUN_DIR takes everything from the run"),
        (["--from", "nowhere"], "nowhere: no such directory"),
    ],
)
def test_what_is_wrong_is_said(workload: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert run(*(argument.format(w=workload) for argument in arguments)) == 2
    assert message in capsys.readouterr().err


def test_floors_are_set_by_name(workload: str, capsys: pytest.CaptureFixture[str]):
    seconds = []
    for value in ("2e-5", "2e-2"):
        arguments = (workload, "h100", "--seeds", "1", "--strategy", "observe", "--json")
        assert run(*arguments, "--set", f"floors.sequence={value}") == 0
        seconds.append(json.loads(capsys.readouterr().out)["strategies"][0]["seconds"]["mean"])
    assert seconds[1] > 2 * seconds[0]


@pytest.mark.parametrize(("setting", "told"), [("floors.sequenc=1", "sequence"), ("floors.sync=soon", "floors.sync")])
def test_a_faulty_floor_is_named(workload: str, setting: str, told: str, capsys: pytest.CaptureFixture[str]):
    assert run(workload, "h100", "--set", setting) == 2
    assert told in capsys.readouterr().err


def test_a_recorded_run_has_floors_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run("--from", str(tmp_path), "--set", "floors.sync=1") == 2
    assert "floors.sync" in capsys.readouterr().err
