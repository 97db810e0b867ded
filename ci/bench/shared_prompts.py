"""Compare whole steps of the commonest public configuration, the case `common` of `ci.bench.step`, where prompts are as
long as so many times their responses: stock verl with and without padding, balance, prompts computed once, and the same
without a prompt that is shared.

    python -m ci.bench.shared_prompts [--of 0.3 1 4] [--rounds 1] [--steps 8] [--layers 8] [--budget 1024]
        [--keep DIRECTORY]

A chat template of the task adds tokens to its prompts, with which its model was trained. `packed` is the control: all
of `fuse.update.share_prompts` but the sharing. On a CPU that alone is faster than stock verl, whose attention pads rows
or makes a mask of all tokens by all tokens; with flash attention stock verl does neither. `over_packed` is the gain of
sharing alone. Ratios are of sums of seconds, stock's of the faster of `stock` and `padded`; intervals 95 % over steps.
`copies_left` is the share of the prompts' tokens, without the last of each, that is computed, `token_share` that of all
tokens, `seconds_share` compares with `packed`. `--budget` is of the tokens of a micro-batch, of all arms: stock verl is
fastest with 1,024 (`ci.bench.step`), while a micro-batch of shared prompts has room for few of them there.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ci.bench.step import CASES, EUCLID, LAYERS, STOCK, TASK, Case, Size, Steps, compared, of, overrides, run
from ci.bench.support.runs import in_folder, parser, to_and_fro
from verl_fuse_cpu.task import tokenizer
from verl_fuse_cpu.task.make import make
from verl_fuse_cpu.task.parameters import Parameters

# Tokens of a prompt of the task, and of a response on average.
PROMPT, RESPONSE = 9, 50
SHARE = ("fuse.update.share_prompts=true",)
PADDED, PACKED, SHARED = "padded", "packed", "shared"
FEATURES = {"balance": ("fuse.update.balance=true",), PACKED: SHARE, SHARED: SHARE}
ARMS = (STOCK, PADDED, *FEATURES)
# Work, its key among verl-fuse's metrics and among verl's timers.
WORK = {"old_log_prob": "old_log_prob", "ref": "ref", "update": "update_actor"}


def case_of(arm: str) -> tuple[Case, str]:
    """Return the case with the features of an arm, and the arm of the case."""
    common = CASES["common"]
    longer = (*common.overrides, "data.max_prompt_length=256", "actor_rollout_ref.rollout.max_model_len=512")
    if arm in FEATURES:
        return replace(common, overrides=longer, features={arm: FEATURES[arm]}), "all"
    padding = ("actor_rollout_ref.model.use_remove_padding=false",) if arm == PADDED else ()
    return replace(common, overrides=(*longer, *padding)), STOCK


def make_task(folder: Path, prompts: float, layers: int) -> Path:
    """Make the task with prompts of so many times the tokens of a response, unless it is there."""
    task, more = folder / f"task-{prompts:g}-{layers}", max(0, round(prompts * RESPONSE) - PROMPT)
    longer = tokenizer.CHAT_TEMPLATE.replace("<|{{ message['role'] }}|>", f"<|{{{{ message['role'] }}}}|>{';' * more}")
    tokens = round(TASK.warm_start.tokens * (PROMPT + more + RESPONSE) / (PROMPT + RESPONSE))
    parameters: Parameters = replace(TASK, layers=layers, warm_start=replace(TASK.warm_start, tokens=tokens))
    with patch.object(tokenizer, "CHAT_TEMPLATE", longer):
        make(task, parameters, say=lambda line: print(line, file=sys.stderr))
    return task


def seconds(steps: Steps, timer: str) -> float:
    return sum(step["parts"].get(timer, 0.0) for step in steps)


def report(prompts: float, found: dict[str, Steps]) -> dict[str, Any]:
    """Return one case of the benchmark's JSON line."""
    stock = min((found[STOCK], found[PADDED]), key=lambda steps: sum(of(steps, "seconds")))
    shared, packed = found[SHARED], found[PACKED]
    copies, tokens = {}, {}
    for work in WORK:
        if any(step["own"][f"fuse/{work}_shared_tokens"] for step in packed):
            sys.exit(f"the control {PACKED!r} shares prompts in {work}: nothing is compared with sharing")
        whole = [step["prompt_tokens"] - step["samples"] for step in shared]
        saved = sum(
            share * step["own"][f"fuse/{work}_shared_tokens"] for share, step in zip(whole, shared, strict=True)
        )
        copies[work] = round(1 - saved / sum(whole), 3)
        tokens[work] = round(1 - saved / sum(step["prompt_tokens"] + step["tokens"] for step in shared), 3)
    return {
        "prompt_to_response": prompts,
        **compared(stock, shared),
        "over_packed": compared(packed, shared),
        "arms": {arm: compared(stock, steps) for arm, steps in found.items()},
        "token_share": tokens,
        "seconds_share": {
            work: round(seconds(shared, timer) / seconds(packed, timer), 3)
            for work, timer in WORK.items()
            if seconds(packed, timer)
        },
        "copies_left": copies,
        "prompt": round(sum(of(shared, "prompt_tokens")) / sum(of(shared, "samples")), 1),
        "response": {
            arm: round(sum(of(steps, "tokens")) / sum(of(steps, "samples")), 1) for arm, steps in found.items()
        },
    }


def main() -> None:
    arguments = parser(__doc__, "leave runs and measurements here, and go on with those that are there")
    arguments.add_argument("--of", type=float, nargs="+", default=[0.3, 1.0, 4.0], help="prompt : response")
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=8, help="measured steps of a run")
    arguments.add_argument("--layers", type=int, default=LAYERS, help="of the model")
    arguments.add_argument("--budget", type=int, default=EUCLID.tokens, help="tokens of a micro-batch")
    given = arguments.parse_args()
    size = Size(given.steps, EUCLID.epoch, given.layers, replace(EUCLID, tokens=given.budget))

    def work(folder: Path) -> dict[str, Any]:
        cases, every = [], []
        for prompts in given.of:
            task = make_task(folder, prompts, given.layers)

            def steps(arm: str, number: int, prompts: float = prompts, task: Path = task) -> Steps:
                name = f"{prompts:g}-{number}-{arm}" + (f"-{given.budget}" if given.budget != EUCLID.tokens else "")
                home, (case, rung) = folder / name, case_of(arm)
                alone = {"STEP_BENCH_UNSHARED": "1"} if arm == PACKED else {}
                return run(home, size, case, overrides(case, rung, task, home, size, number), **alone)

            found = to_and_fro(ARMS, given.rounds, steps)
            every += [step for steps in found.values() for step in steps]
            cases.append(report(prompts, found))
        lost, twice = int(sum(of(every, "lost"))), int(sum(of(every, "duplicated")))
        given_too = {"steps": given.steps, "budget": given.budget}
        return {"bench": "shared_prompts", "cases": cases, "lost": lost, "duplicated": twice, **given_too}

    in_folder(given.keep, work, again=True)


if __name__ == "__main__":
    main()
