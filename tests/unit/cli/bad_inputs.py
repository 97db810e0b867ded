"""Inputs that every command must refuse: files to write, arguments, and a part of the line that is expected on stderr.

Run as a program, it puts all of them through the command in one process, in the working directory, and prints
what became of each as JSON.
"""

import contextlib
import io
import json
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

# Of processor time: the machine may be busy.
LIMIT_SECONDS = 10
WORKLOAD = {
    "algorithm": "ppo", "prompts": 512, "prompt": "fixed:128", "response": "uniform:1-256", "minibatches": 4,
    "actor": "qwen2.5-0.5b", "critic": "qwen2.5-0.5b", "reference": "qwen2.5-0.5b",
}  # fmt: skip
PIPELINE = {"model": "actor", "ranks": [0, 1], "microbatches": 2, "forward": 1, "backward": 2, "activation": 1}
PROBLEM = {"ranks": 2, "pipelines": [PIPELINE]}
CALL = {"call": "actor_generate", "mesh": [0, 8], "layout": "dp8"}
PLAN = {"version": 1, "calls": [CALL]}
DEVICE = {"name": "X", "memory": 8e10, "flops": 1e14, "bandwidth": 1e12}
CLUSTER = {
    "device": DEVICE, "nodes": 1, "devices_per_node": 8, "intra_bandwidth": 1e11, "inter_bandwidth": 1e10,
    "host_bandwidth": 1e10,
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96,
    "vocab_size": 100,
}  # fmt: skip


@dataclass(frozen=True)
class Bad:
    """`files`: name -> content (JSON unless it is text or bytes; None: a folder)."""

    name: str
    arguments: str
    says: str
    files: dict[str, object] = field(default_factory=dict)


def step(name: str, says: str, **changes: object) -> Bad:
    """A workload with these keys changed; `...` removes one."""
    data = {key: value for key, value in {**WORKLOAD, **changes}.items() if value is not ...}
    return Bad(f"workload: {name}", "simulate step.yaml h100", says, {"step.yaml": data})


def text(name: str, content: object, says: str) -> Bad:
    """A workload file of this content."""
    return Bad(f"workload file: {name}", "simulate step.yaml h100", says, {"step.yaml": content})


def cluster(name: str, says: str, **changes: object) -> Bad:
    files = {"step.yaml": WORKLOAD, "cluster.yaml": {**CLUSTER, **changes}}
    return Bad(f"cluster: {name}", "simulate step.yaml cluster.yaml", says, files)


def on(arguments: str, says: str, **files: object) -> Bad:
    """Arguments beside a good workload; `files` have `_` for the dot of their names."""
    written = {name.replace("_", "."): content for name, content in files.items()}
    return Bad(arguments[:60], arguments, says, {"step.yaml": WORKLOAD, **written})


def problem(name: str, says: str, **changes: object) -> Bad:
    return Bad(f"problem: {name}", "schedule solve problem.json", says, {"problem.json": {**PROBLEM, **changes}})


def pipeline(name: str, says: str, **changes: object) -> Bad:
    return problem(name, says, pipelines=[{**PIPELINE, **changes}])


FROM_MODEL = (
    "schedule from-model {} --actor {} --critic llama-7b --actor-layout {} --critic-layout tp8,pp4 --out x.json"
)


def from_model(
    says: str, cluster: str = "h100x4", actor: str = "llama-7b", layout: str = "tp8,pp4", more: str = ""
) -> Bad:
    arguments = f"{FROM_MODEL.format(cluster, actor, layout)} {more}"
    return Bad(f"from-model: {says[:40]}", arguments.strip(), says)


# ruff: disable[E501]  (a table of data)
TABLE = (
    step("a number of prompts beyond any batch", "99999999999999 sequences a step; needs at most 262144", prompts=99999999999999),
    step("more than 64 bits", "needs at most 262144", prompts=10**30),
    step("no prompts", "prompts=0; needs a whole number >= 1", prompts=0),
    step("negative", "prompts=-5", prompts=-5),
    step("half a prompt", "workload.prompts=1.5: needs a whole number", prompts=1.5),
    step("a word", "workload.prompts='many': needs a whole number", prompts="many"),
    step("a list", "workload.prompts=[1]", prompts=[1]),
    step("a truth", "workload.prompts=true", prompts=True),
    step("nothing", "workload.prompts=null", prompts=None),
    step("left out", "missing prompts", prompts=...),
    step("mini-batches that do not divide", "minibatches=7 do not divide prompts=512", minibatches=7),
    step("no mini-batches", "minibatches=0", minibatches=0),
    step("no samples", "samples=0", samples=0),
    step("too many samples", "512000000000 sequences a step", samples=10**9),
    step("too many epochs", "epochs=1000000000000; needs at most 1000", epochs=10**12),
    step("another algorithm", "workload.algorithm='dpo': needs one of 'ppo', 'grpo'", algorithm="dpo"),
    step("a misspelt key", "workload.promts: unknown key (did you mean 'prompts'?)", promts=3),
    step("PPO without critic", "critic=none; needs a model with ppo", critic=...),
    step("GRPO with critic", "needs none with grpo", algorithm="grpo"),
    step("an unknown model", "model 'llama-9b': unknown; did you mean", actor="llama-9b"),
    step("a name longer than a path may be", "unknown; known: ", actor="x" * 5000),
    step("a model too large for the devices", "fits nowhere for actor_generate on 8 x H100", actor="llama-3.1-405b"),
    step("an empty model", "config.json: cannot be read", actor=""),
    step("lengths of zero", "needs a whole number from 1 to", prompt="fixed:0"),
    step("lengths beyond any context", "needs a whole number from 1 to", prompt="fixed:99999999999"),
    step("a range that runs backwards", "needs a range of whole numbers >= 1", prompt="uniform:5-1"),
    step("a number of thousands of digits", "needs a range of whole numbers", prompt="uniform:1-" + "9" * 5000),
    step("a distribution without parameters", "needs exactly median, sigma, max", response="lognormal:"),
    step("a parameter that is no number", "needs a number > 0", response="lognormal:median=nan,sigma=1,max=9"),
    step("a limit beyond any context", "needs a whole number from 1 to", response="lognormal:median=9,sigma=1,max=1e300"),
    step("a share above one", "share=2; needs 0 to 1", response="bimodal:short=2,long=9,share=2,sigma=1,max=99"),
    step("an unknown distribution", "unknown form; allowed: fixed:512", response="gauss:3"),
    step("a file that is missing", "none.csv: cannot be read: No such file or directory", prompt="none.csv#n"),
    step("a file of another kind", "needs a file ending in .csv", prompt="notes.txt#n"),
    Bad("lengths: no such column", "simulate step.yaml h100", "no column 'n'; there is 'm'",
        {"step.yaml": {**WORKLOAD, "prompt": "a.csv#n"}, "a.csv": "m\n1\n"}),
    Bad("lengths: negative", "simulate step.yaml h100", "value -3; needs 1 to", {"step.yaml": {**WORKLOAD, "prompt": "a.csv#n"}, "a.csv": "n\n-3\n"}),
    Bad("lengths: infinite", "simulate step.yaml h100", "row 1: 'inf'", {"step.yaml": {**WORKLOAD, "prompt": "a.csv#n"}, "a.csv": "n\ninf\n"}),
    Bad("lengths: broken JSON", "simulate step.yaml h100", "line 1: not JSON", {"step.yaml": {**WORKLOAD, "prompt": "a.jsonl#n"}, "a.jsonl": "{\n"}),
    Bad("lengths: nested JSON", "simulate step.yaml h100", "nested too deeply",
        {"step.yaml": {**WORKLOAD, "prompt": "a.jsonl#n"}, "a.jsonl": "[" * 100000}),
    Bad("lengths: no run", "simulate step.yaml h100", "no recorded step under timeline/", {"step.yaml": {**WORKLOAD, "prompt": "run#prompt"}, "run": None}),
    Bad("model: no JSON", "simulate step.yaml h100", "config.json: not JSON", {"step.yaml": {**WORKLOAD, "actor": "config.json"}, "config.json": "{"}),
    Bad("model: no heads", "simulate step.yaml h100", "num_attention_heads=0; needs a whole number > 0",
        {"step.yaml": {**WORKLOAD, "actor": "config.json"}, "config.json": {**CONFIG, "num_attention_heads": 0}}),
    Bad("model: another architecture", "simulate step.yaml h100", "model_type='mamba'; known:",
        {"step.yaml": {**WORKLOAD, "actor": "config.json"}, "config.json": {**CONFIG, "model_type": "mamba"}}),
    text("empty", "", "workload: missing algorithm"),
    text("no YAML", "a: [1", "step.yaml: not YAML: "),
    text("a list", "- 1", "workload=[1]: needs a block with keys"),
    text("a number", "3", "step.yaml: needs a block of keys"),
    text("a key twice", "prompts: 1\nprompts: 2", "not YAML: found duplicate key prompts, line 2"),
    text("bytes", b"\xff\xfe\x00", "step.yaml: cannot be read: not UTF-8"),
    text("a folder", None, "step.yaml: cannot be read: Is a directory"),
    text("too large", " " * (2**20 + 1), "it has more than 1048576 bytes"),
    text("deeply nested", "[" * 20000, "not YAML: "),
    text("an interpolation", "prompts: ${gone}", "not YAML: Interpolation key 'gone' not found"),
    text("a Python object", "prompts: !!python/object/apply:os.getcwd []", "not YAML: could not determine a constructor"),
    Bad("workload file: missing", "simulate none.yaml h100", "none.yaml: cannot be read: No such file or directory"),
    Bad("workload file: without end", "simulate /dev/zero h100", "/dev/zero: cannot be read: it has more than 1048576 bytes"),
    on("simulate step.yaml h100x99999999", "nodes=99999999 of 8 are 799999992 devices; needs at most 131072"),
    on("simulate step.yaml h100x100000000000", "nodes=100000000000 of 8 are 800000000000 devices; needs at most 131072"),
    on("simulate step.yaml h100x" + "9" * 5000, "nodes is a number of 5000 digits; needs at most 131072 devices"),
    on("simulate step.yaml h100x0", "nodes=0; needs a whole number >= 1"),
    on("simulate step.yaml h100x-1", "device 'h100x-1': unknown (did you mean 'H100'?)"),
    on("simulate step.yaml h10", "device 'h10': unknown (did you mean 'H100'?); built in: A100-40G"),
    on("simulate step.yaml none.yaml", "none.yaml: cannot be read: No such file or directory"),
    cluster("too many devices", "nodes=1000000000000 of 8", nodes=10**12),
    cluster("too many devices in a node", "are 1000000000 devices", devices_per_node=10**9),
    cluster("an unknown key", "cluster.node: unknown key (did you mean 'nodes'?)", node=1),
    cluster("no bandwidth", "intra_bandwidth=0.0; needs a number > 0", intra_bandwidth=0),
    cluster("an endless bandwidth", "inter_bandwidth", inter_bandwidth=float("inf")),
    cluster("a price below zero", "price_per_device_hour=-1.0; needs a number >= 0", price_per_device_hour=-1),
    cluster("a device of no memory", "memory=0.0; needs a number > 0", device={**DEVICE, "memory": 0}),
    cluster("a device that is unfinished", "missing device.memory", device={"name": "X", "flops": 1e14, "bandwidth": 1e12}),
    cluster("a number as device", "device '5': unknown", device=5),
    on("simulate", "needs WORKLOAD.yaml and CLUSTER, or CLUSTER with --script FILE"),
    on("simulate step.yaml h100 more", "needs WORKLOAD.yaml and CLUSTER, or CLUSTER with --script FILE"),
    on("simulate step.yaml h100 --seed 3", "No such option: --seed (Possible options: --seeds"),
    on("simulate step.yaml h100 --seeds 0", "Invalid value for '--seeds'"),
    on("simulate step.yaml h100 --seeds 99999999999", "Invalid value for '--seeds'"),
    on("simulate step.yaml h100 --seeds few", "Invalid value for '--seeds'"),
    on("simulate step.yaml h100 --strategy fast", "strategy='fast'; allowed: stock"),
    on("simulate step.yaml h100 --strategy realloc", "strategy='realloc' needs --plan"),
    on("simulate step.yaml h100 --set poll", "--set 'poll': needs KEY=VALUE"),
    on("simulate step.yaml h100 --set stock_pol=1", "options.stock_pol: unknown key (did you mean 'stock_poll'?)"),
    on("simulate step.yaml h100 --set rollout_memory=2", "needs >= 0.01 and <= 1.0"),
    on("simulate step.yaml h100 --set migration=teleport", "options.migration='teleport': needs one of 'auto'"),
    on("simulate step.yaml h100 --set schedule=magic", "method='magic'; allowed: serial"),
    on("simulate step.yaml h100 --set stock_poll=[", "--set 'stock_poll=[': the value is not YAML"),
    on("simulate step.yaml h100 --seeds 1 --strategy stock --timeline file", "file: cannot be written: Not a directory", file="text"),
    on("simulate step.yaml h100 --plan none.json", "none.json: cannot be read: No such file"),
    on("simulate step.yaml h100 --plan plan.json", "plan.json: not a verl-fuse plan", plan_json="{"),
    on("simulate step.yaml h100 --plan plan.json", "plan version 9; this release reads 1", plan_json={"version": 9}),
    on("simulate step.yaml h100 --plan plan.json", "plan: no call 'reference_infer'", plan_json=PLAN),
    on("simulate step.yaml h100 --plan plan.json", "layout dp8 needs 8 devices, its mesh has 4",
       plan_json={"version": 1, "calls": [{**CALL, "mesh": [0, 4]}]}),
    on("simulate step.yaml h100 --plan plan.json", "needs first >= 0", plan_json={"version": 1, "calls": [{**CALL, "mesh": [-8, 8]}]}),
    on("simulate step.yaml h100 --profile profile.json", "profile version 7", profile_json={"version": 7}),
    on("simulate step.yaml h100 --from run", "--from RUN_DIR takes everything from the run"),
    on("simulate --from run --seeds 3", "--from RUN_DIR takes everything from the run"),
    on("simulate --from nowhere", "nowhere: no such directory"),
    on("plan step.yaml h100 --strategy deepspeed", "--strategy deepspeed: allowed: fsdp, megatron"),
    on("plan step.yaml h100 --ideal --verl", "--ideal plans need reallocation"),
    on("plan step.yaml h100 --verl --json", "--verl and --json exclude each other"),
    on("plan step.yaml h100 --feature elastic", "--feature elastic: allowed: interstage, pipeline, placement"),
    on("plan step.yaml h100 --weight 2", "Invalid value for '--weight'"),
    on("plan step.yaml h100 --weight nan", "Invalid value for '--weight'"),
    on("plan step.yaml h100 --time-limit 0", "Invalid value for '--time-limit'"),
    on("plan step.yaml h100 --time-limit nan", "Invalid value for '--time-limit'"),
    on("plan step.yaml h100 --time-limit inf", "Invalid value for '--time-limit'"),
    on("plan step.yaml h100 --out none/plan.json", "none/plan.json: cannot be written: No such file or directory"),
    on("plan step.yaml h100 --out .", "cannot be written: it is a folder"),
    on("plan step.yaml h100x99999999", "needs at most 131072"),
    on("plan step.yaml h100x513", "plan: 4104 devices; needs at most 4096"),
    on("plan step.yaml", "Missing argument 'CLUSTER'"),
    problem("no ranks", "problem.json: ranks=0", ranks=0),
    problem("more ranks than any cluster", "ranks=1000000000; needs at most 131072", ranks=10**9),
    problem("no pipelines", "pipelines=[]; needs at least one", pipelines=[]),
    problem("an unknown key", "unknown key 'rank'", rank=2),
    problem("an unknown unit", "time_unit='ms'; allowed: '', 's'", time_unit="ms"),
    problem("a limit that nothing meets", "memory_limit=0.5 is infeasible", memory_limit=0.5),
    pipeline("a negative cost", "forward=-1", forward=-1),
    pipeline("too many micro-batches", "at most 200000 are allowed", microbatches=10**6),
    pipeline("two stages on a rank", "puts two stages on rank 0", ranks=[0, 0]),
    Bad("problem: not JSON", "schedule solve problem.json", "problem is not JSON", {"problem.json": "{"}),
    Bad("problem: nested", "schedule solve problem.json", "problem.json: cannot be read: nested too deeply", {"problem.json": "[" * 10**6}),
    Bad("problem: digits", "schedule compare problem.json", "problem.json: cannot be read: Exceeds the limit", {"problem.json": "9" * 5000}),
    Bad("problem: missing", "schedule solve none.json", "none.json: cannot be read: No such file or directory"),
    Bad("schedule: another method", "schedule solve problem.json --method magic", "method='magic'; allowed", {"problem.json": PROBLEM}),
    Bad("schedule: workers", "schedule solve problem.json --workers 0", "Invalid value for '--workers'", {"problem.json": PROBLEM}),
    Bad("schedule: out", "schedule solve problem.json --out none/x.json", "none/x.json: cannot be written", {"problem.json": PROBLEM}),
    Bad("schedule: show a problem", "schedule show problem.json", "not a verl-fuse schedule: it has no key 'problem'", {"problem.json": PROBLEM}),
    Bad("schedule: subcommand", "schedule slove problem.json", "Did you mean 'solve'?"),
    from_model("layout 'tp8 qq4': 'qq4'; needs degrees", layout="tp8,qq4"),
    from_model("'tp0'; needs degrees", layout="tp0,pp4"),
    from_model("needs degrees", layout="tp8,pp" + "9" * 5000),
    from_model("device 'h10': unknown", cluster="h10"),
    from_model("sequences a step; needs at most", more="--sequences 99999999999"),
    from_model("at most 200000 are allowed", more="--microbatches 1000000000"),
    Bad("trace: nowhere", "trace nowhere", "nowhere: no such directory; needs the directory of a run"),
    Bad("trace: nothing recorded", "trace run", "run: no recorded step under timeline/", {"run": None}),
    Bad("trace: another file", "trace notes.txt", "notes.txt: needs the directory of a run", {"notes.txt": "x"}),
    Bad("trace: damaged", "trace run", "step_000001.json: not a verl-fuse timeline", {"run/timeline/step_000001.json": "{"}),
    Bad("trace: damaged, all", "trace run --all --json", "not a verl-fuse timeline", {"run/timeline/step_000001.json": "", "run/timeline/step_000002.json": ""}),
    Bad("trace: another step", "trace run --step 4", "run: step 4 is not recorded; recorded: 1", {"run/timeline/step_000001.json": "{"}),
    Bad("trace: both", "trace run --step 1 --all", "--step 1 and --all exclude each other", {"run": None}),
    Bad("profile: batches", "profile --model llama-7b --out x.json --batches 0", "--batches=0: needs whole numbers >= 1"),
    Bad("profile: a batch beyond memory", "profile --model llama-7b --out x.json --batches 99999999999", "--batches=99999999999: needs at most"),
    Bad("profile: lengths", "profile --model llama-7b --out x.json --lengths a,b", "--lengths=a,b: needs whole numbers"),
    Bad("profile: model", "profile --model llama-9b --out x.json", "model 'llama-9b': unknown"),
    Bad("profile: run", "profile --model llama-7b --out x.json --from nowhere", "nowhere: no such directory"),
    Bad("profile: no place", "profile --model llama-7b", "Missing option '--out'"),
    Bad("run: no recipe", "run ppo-gpu", "no recipe 'ppo-gpu'"),
    Bad("check: nothing to read", "check", "check needs arguments of verl.trainer.main_ppo behind --, or --script FILE"),
    Bad("check: no override", "check -- grpo", "override 'grpo' cannot be read"),
    Bad("check: no script", "check --script none.sh", "none.sh: cannot be read: No such file or directory"),
    Bad("check: a folder", "check --script run.sh", "run.sh: cannot be read: Is a directory", {"run.sh": None}),
    Bad("check: no trainer", "check --script run.sh", "run.sh: there is no command of verl.trainer.main_ppo", {"run.sh": "make\n"}),
    Bad("check: nested", "check --script run.sh", "run.sh: cannot be read: nested too deeply", {"run.sh": "( " * 20000}),
    Bad("check: no YAML", "check --script a.yaml", "a.yaml: not YAML: ", {"a.yaml": "a: [1"}),
    Bad("example: another", "example workloads", "no example 'workloads' (did you mean 'workload'?)"),
    Bad("a command that is misspelt", "simulat step.yaml h100", "no command 'simulat' (did you mean 'simulate'?)"),
    Bad("an option that is misspelt", "--verson", "No such option: --verson (Possible options: --version)"),
    Bad("doctor: an option", "doctor --rai", "No such option: --rai"),
)  # fmt: skip
# ruff: enable[E501]


def arguments_of(bad: Bad) -> list[str]:
    """A comma stands for a blank inside an argument."""
    words = bad.arguments.split()
    return [word.replace(",", " ") if word.startswith("tp") else word for word in words]


def write(bad: Bad, folder: Path) -> None:
    for name, content in bad.files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if content is None:
            path.mkdir()
        elif isinstance(content, bytes):
            path.write_bytes(content)
        else:
            path.write_text(content if isinstance(content, str) else json.dumps(content))


def peak_kilobytes(pid: int) -> int:
    """Most memory that a process has held at once; 0 of one that has ended. getrusage counts what its parent held
    when it was forked as well."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def outcome(arguments: list[str]) -> dict[str, object]:
    """Run one command in this process."""
    from verl_fuse.cli.main import main

    out, err, begun = io.StringIO(), io.StringIO(), time.process_time()
    code: object = None
    signal.setitimer(signal.ITIMER_PROF, LIMIT_SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            main(arguments)
    except SystemExit as exit:
        code = exit.code
    except BaseException:  # noqa: BLE001 - a traceback is what the test is about
        err.write(traceback.format_exc())
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"code": code, "out": out.getvalue(), "err": err.getvalue(), "seconds": time.process_time() - begun}


class TooLong(BaseException):
    """Not an Exception: no command may take it for one of its own."""


def too_long(number: int, frame: object) -> None:
    raise TooLong


if __name__ == "__main__":
    signal.signal(signal.SIGPROF, too_long)
    found = []
    for index, bad in enumerate(TABLE):
        folder = Path(str(index)).absolute()
        folder.mkdir()
        write(bad, folder)
        os.chdir(folder)
        found.append(outcome(arguments_of(bad)))
        os.chdir(folder.parent)
    sys.__stdout__.write(json.dumps({"outcomes": found, "kilobytes": peak_kilobytes(os.getpid())}))
