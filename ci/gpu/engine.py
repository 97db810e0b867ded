"""Times a pass of vLLM's engine with and without drafts, at several numbers of requests.

    python -m ci.gpu.engine --model FOLDER --out FOLDER [--device cpu] [--arms stock history ...]

Engines start together, each in a process of its own, and take turns to measure. Per arm and number of requests:
milliseconds of a pass that brings one token a request (random prompts, nothing to draft or no draft accepted), and
milliseconds a token of prompts that are decoded greedily twice, the second time with all that a drafter remembers.

| arm | is |
|---|---|
| stock | vLLM as it is |
| history | the drafter of `fuse.speculation` (`tokens: auto`) with vLLM's own mode of graphs: a run has history-full |
| none | a drafter that drafts nothing, 3 tokens allowed: what remains is vLLM's own |
| wrong | a drafter of 3 random tokens for each request |
| ngram | vLLM's `ngram_gpu`, whose drafter works on the device |
| ...-full | with `cudagraph_mode=FULL` |
"""

import argparse
import fcntl
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ci.gpu.machine import DEVICES, Report, require_device
from verl_fuse.errors import FuseError

ARMS = ("stock", "history", "history-full", "none-full", "ngram", "ngram-full")
REQUESTS = (1, 8, 64, 256)
PROMPT, PASSES, REPEATED = 64, 96, 128
DRAFTED = 3
REFUSED = 2


class Drafter:
    """vLLM's `custom_class`: drafts nothing, or random tokens (DRAFTS=wrong)."""

    def __init__(self, vllm_config):
        self._words = vllm_config.model_config.hf_config.vocab_size
        self._drafts = DRAFTED if os.environ["DRAFTS"] == "wrong" else 0

    def load_model(self, *arguments, **named):
        pass

    def propose(self, sampled_token_ids, num_tokens_no_spec, token_ids_cpu, **named):
        numbers = random.Random(len(sampled_token_ids))
        return [[numbers.randrange(10, self._words) for _ in range(self._drafts)] for _ in sampled_token_ids]


def arguments_of(arm: str, folder: Path) -> dict[str, Any]:
    """Return the arguments that the arm adds to vLLM's."""
    kind, _, graphs = arm.partition("-")
    found: dict[str, Any] = {"compilation_config": {"cudagraph_mode": "FULL"}} if graphs == "full" else {}
    if kind == "history":
        from verl_fuse_speculation.engine import engine_arguments

        folder.mkdir(exist_ok=True)
        found |= engine_arguments("auto", 256 << 20, 3, str(folder))
    elif kind in ("none", "wrong"):
        os.environ["DRAFTS"] = kind
        drafter = {"method": "custom_class", "model": "ci.gpu.engine.Drafter", "num_speculative_tokens": DRAFTED}
        found["speculative_config"] = drafter
    elif kind == "ngram":
        found["speculative_config"] = {"method": "ngram_gpu", "num_speculative_tokens": 4}
    elif kind != "stock":
        raise ValueError(f"arm {arm}: needs one of stock, history, none, wrong, ngram, or one of them with -full")
    return found


def measure(arm: str, model: Path, out: Path, device: str) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    begun = time.monotonic()
    small = device == "cpu"
    llm = LLM(
        model=str(model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=512,
        dtype="float32" if small else "bfloat16",
        max_num_seqs=REQUESTS[-1],
        kv_cache_memory_bytes=(64 << 20) if small else (3 << 29),
        gpu_memory_utilization=0.05,
        seed=0,
        disable_log_stats=False,
        enforce_eager=small,
        **arguments_of(arm, out / f"{arm}.history"),
    )
    used = llm.llm_engine.vllm_config
    told = {
        "arm": arm,
        "asynchronous": used.scheduler_config.async_scheduling,
        "graphs": str(used.compilation_config.cudagraph_mode),
        "largest graph": used.compilation_config.max_cudagraph_capture_size,
        "start": round(time.monotonic() - begun, 1),
    }
    print(json.dumps(told), flush=True)
    numbers = random.Random(1)
    words = used.model_config.hf_config.vocab_size
    prompts: Any = [
        {"prompt_token_ids": [numbers.randrange(10, words) for _ in range(PROMPT)]} for _ in range(REQUESTS[-1])
    ]
    counts, passes, repeated = ((1, 8), 8, 8) if small else (REQUESTS, PASSES, REPEATED)

    def generate(requests: int, tokens: int, temperature: float) -> tuple[float, list[Any]]:
        wanted = SamplingParams(
            temperature=temperature, max_tokens=tokens, min_tokens=1, ignore_eos=True, detokenize=False
        )
        at = time.perf_counter()
        done = llm.generate(prompts[:requests], wanted, use_tqdm=False)
        return time.perf_counter() - at, [each.outputs[0].token_ids for each in done]

    def drafts() -> Mapping[str, float]:
        counters: list[Any] = [
            each for each in llm.get_metrics() if "spec_decode" in each.name and hasattr(each, "value")
        ]
        return {each.name.split("spec_decode_")[1]: each.value for each in counters}

    with (out / "turn").open("w") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        generate(8, 8, 1.0)
        generate(counts[-1], 8, 1.0)
        told["pass"], told["again"] = {}, {}
        for requests in counts:
            # The time of a few tokens is that of the prompts.
            few = min(generate(requests, 4, 1.0)[0] for _ in range(2))
            many = min(generate(requests, 4 + passes, 1.0)[0] for _ in range(3))
            told["pass"][requests] = round((many - few) / passes * 1e3, 3)
        for requests in counts[1:]:
            before = drafts()
            first, one = generate(requests, repeated, 0.0)
            between = drafts()
            second, other = generate(requests, repeated, 0.0)
            told["again"][requests] = {
                "first": round(first / repeated * 1e3, 3),
                "second": round(second / repeated * 1e3, 3),
                "same samples": sum(each == again for each, again in zip(one, other, strict=True)),
                "first drafts": _more(before, between),
                "second drafts": _more(between, drafts()),
            }
    llm.llm_engine.engine_core.shutdown()
    return told


def _more(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
    return {name: value - before.get(name, 0) for name, value in after.items()}


def table(found: list[dict[str, Any]]) -> str:
    lines = [f"{'arm':14} async  graphs                      milliseconds of a pass; of a token repeated"]
    for each in found:
        passes = " ".join(f"{value:8.3f}" for value in each["pass"].values())
        again = " ".join(f"{value['second']:8.3f}" for value in each["again"].values())
        lines.append(f"{each['arm']:14} {each['asynchronous']!s:5}  {each['graphs']:34} {passes} | {again}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ci.gpu.engine", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a folder with the model's config.json")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--only", help="measure this arm in this process")
    options = parser.parse_args(arguments)
    out = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    # vLLM forks its engine: the process that measures must not have used the device itself.
    if options.only:
        told = measure(options.only, options.model, out, options.device)
        (out / f"engine-{options.only}.json").write_text(json.dumps(told) + "\n")
        os._exit(0)
    try:
        require_device(options.device)
    except FuseError as error:
        print(f"ci.gpu.engine: {error}", file=sys.stderr)
        return REFUSED
    same = ["--model", str(options.model), "--out", str(out), "--device", options.device]
    runs, begun = {}, time.monotonic()
    for arm in options.arms:
        with (out / f"engine-{arm}.log").open("wb") as log:
            command = [sys.executable, "-m", "ci.gpu.engine", *same, "--only", arm]
            runs[arm] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    failed = [arm for arm, run in runs.items() if run.wait()]
    paths = [out / f"engine-{arm}.json" for arm in options.arms]
    found = [json.loads(path.read_text()) for path in paths if path.exists()]
    result = {"arms": found, "faults": [f"{arm} failed, see {out}/engine-{arm}.log" for arm in failed]}
    Report.of("engine", options.device, time.monotonic() - begun, result).write(out / "engine.json")
    print(table(found))
    for fault in result["faults"]:
        print(f"ci.gpu.engine: {fault}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
