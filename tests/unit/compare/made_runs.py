"""Runs with known differences, and their folders: metrics as verl's file logger writes them, timelines by
the library's own writer."""

import json
from pathlib import Path

import numpy as np

from verl_fuse.compare.run import RunMetrics
from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.files import record_step

STAGES = {"gen": 0.6, "old_log_prob": 0.1, "adv": 0.01, "update_actor": 0.2}


def step_records(
    seed: int,
    steps: int = 20,
    seconds: float = 5.0,
    *,
    fused: bool = False,
    noise: float = 0.08,
    reward: float = 0.3,
    first: int = 1,
    alike: float = 0.0,
) -> list[dict]:
    """Steps of `seconds` that grow by half over 100 steps, with log-normal noise of which neighbours share `alike`; the
    first one takes four times as long. Rewards rise from `reward`."""
    rng = np.random.default_rng([seed, fused])
    shock, level = rng.normal(size=steps), 0.0
    records = []
    for index in range(steps):
        level = alike * level + np.sqrt(1 - alike**2) * shock[index] if index else shock[0]
        whole = (
            seconds
            * (1 + (first + index) / 200)
            * float(np.exp(noise * level - noise**2 / 2))
            * (4 if index == 0 else 1)
        )
        data = {f"timing_s/{name}": share * whole for name, share in STAGES.items()}
        data |= {"timing_s/step": whole, "perf/total_num_tokens": 1000}
        data |= {"critic/score/mean": reward + 0.004 * (first + index) + 0.03 * rng.normal()}
        data |= {"actor/ppo_kl": 0.001 + 0.0003 * rng.normal(), "response_length/mean": 80 + 4 * rng.normal()}
        if fused:
            data |= {"fuse/fallbacks": 0.0, "fuse/samples_trained": 64.0, "fuse/samples_missing": 0.0}
        records.append({"step": first + index, "data": data})
    return records


def made(seed: int, name: str = "run", **options) -> RunMetrics:
    """The run of these records."""
    return RunMetrics.of(name, [(record["step"], record["data"]) for record in step_records(seed, **options)])


def write_run(folder: Path, records: list[dict]) -> Path:
    """The folder of a run; with a timeline of every step, if verl-fuse was on."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    for record in records:
        whole, gen = record["data"]["timing_s/step"], record["data"]["timing_s/gen"]
        if "fuse/fallbacks" in record["data"]:
            spans = (Span("gen", "step", "stage", 0.0, gen),)
            record_step(folder, Timeline(folder.name, record["step"], 0.0, whole, spans), html=False, perfetto=False)
    return folder
