"""The fate of every drafted token in a real vLLM engine, against the model's own distribution: `python
verified_tokens.py '{JSON}' OUT.npz`.

Given all tokens before it, what happens at a position has a known distribution if verification is exact: a drafted
token x is accepted with the model's probability of x; after a rejection the token is drawn from the model's
distribution without x; after all drafts were accepted, from the whole one. A randomised probability integral
transform of each is uniform, whatever was drafted. The model's logits are those of transformers, in float32;
temperature and top-p are vLLM's own.

`fault` plants one: "unpatched" (the CPU's kernel as shipped), "lenient" (2 % of the drafts that were rejected are
accepted), "untested" (every draft is).
"""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from speculating_engine import engine, generate, prompts

ACCEPTED, RECOVERED, BONUS, PLAIN = range(4)
LENIENCE = 0.02
# A draft counts by one over its probability, but no more than one of this probability.
RARE = 0.05
# Positions whose tokens are compared with and without drafts.
POSITIONS = 8


@dataclass
class Witness:
    """A drafter before the drafter of `runner`, which keeps the drafted tokens and vLLM's verdicts on them."""

    runner: Any
    drafter: Any
    # By request: the tokens drafted last; all its tokens with the prompt; (position, drafted token or -1,
    # what the token there is).
    drafted: dict[str, list[int]] = field(default_factory=dict)
    tokens: dict[str, np.ndarray] = field(default_factory=dict)
    marks: dict[str, list[tuple[int, int, int]]] = field(default_factory=dict)

    def propose(self, sampled: Any, lengths: np.ndarray, rows: np.ndarray, **kwargs: Any) -> list[list[int]]:
        found = self.drafter.propose(sampled, lengths, rows, **kwargs)
        requests = list(self.runner.input_batch.req_ids)
        for row, (request, new) in enumerate(zip(requests, sampled, strict=True)):
            end, before = int(lengths[row]), self.drafted.get(request, [])
            self.tokens[request] = rows[row, :end].copy()
            marks = self.marks.setdefault(request, [])
            for place, position in enumerate(range(end - len(new), end)):
                if place < len(new) - 1:
                    marks.append((position, before[place], ACCEPTED))
                elif len(new) > len(before):
                    marks.append((position, -1, BONUS if before else PLAIN))
                else:
                    marks.append((position, before[place], RECOVERED))
        self.drafted = dict(zip(requests, found, strict=True))
        return found


def plant(fault: str | None) -> None:
    """Make vLLM's verification wrong, before an engine is made."""
    if fault not in ("lenient", "untested"):
        return
    import torch
    import vllm.utils.cpu_triton_utils as kernels

    verify = kernels._rejection_random_sample_kernel_impl

    def faulty(*args: Any, **kwargs: Any) -> None:
        changed = list(args)
        uniform = changed[7]
        spared = (
            torch.rand(uniform.shape) < LENIENCE if fault == "lenient" else torch.ones(uniform.shape, dtype=torch.bool)
        )
        changed[7] = torch.where(spared, torch.zeros_like(uniform), uniform)
        verify(*changed, **kwargs)

    # vLLM takes the function since 0.31, before it a wrapper.
    kernels._rejection_random_sample_kernel_impl = faulty
    if hasattr(kernels, "rejection_random_sample_kernel"):
        kernels.rejection_random_sample_kernel = kernels._FuncWrapper(faulty)


def transforms(model: str, witness: Witness, temperature: float, top_p: float, end: int) -> dict[str, np.ndarray]:
    """Values that are uniform if verification is exact, by what they are of; and, of tried tokens, how many more were
    accepted than expected, in standard deviations."""
    import torch
    from transformers import AutoModelForCausalLM
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rng = np.random.default_rng(0)
    values: dict[str, list[float]] = {"tried": [], "recovered": [], "bonus": [], "plain": [], "token": []}
    excess, variance, impossible, tokens_seen = 0.0, 0.0, 0, 0
    for name, tokens in witness.tokens.items():
        marks = witness.marks[name]
        with torch.no_grad():
            logits = reference(torch.tensor(tokens[None].astype(np.int64))).logits[0] / temperature
        logits = apply_top_k_top_p(logits, None, torch.full((len(logits),), top_p)) if top_p < 1 else logits
        chances = torch.softmax(logits.double(), -1).numpy()
        for position, drafted, kind in marks:
            chance, token = chances[position - 1], int(tokens[position])
            tokens_seen += 1
            impossible += chance[token] == 0.0
            values["token"].append(_transform(chance, token, rng))
            if kind in (ACCEPTED, RECOVERED):
                taken = float(chance[drafted])
                values["tried"].append(rng.random() * taken if kind == ACCEPTED else taken + rng.random() * (1 - taken))
                # What a verification that lets some rejected drafts pass shows in most: drafts that are unlikely.
                weight = 1 / max(taken, RARE)
                excess += weight * ((kind == ACCEPTED) - taken)
                variance += weight**2 * taken * (1 - taken)
            if kind == RECOVERED and chance[drafted] < 1:
                left = chance.copy()
                left[drafted] = 0.0
                values["recovered"].append(_transform(left / left.sum(), token, rng))
            elif kind in (BONUS, PLAIN):
                values["bonus" if kind == BONUS else "plain"].append(_transform(chance, token, rng))
            if token == end:
                break
    return {
        **{name: np.array(found) for name, found in values.items()},
        "excess": np.array(excess / max(variance, 1e-12) ** 0.5),
        "impossible": np.array(impossible / max(tokens_seen, 1)),
    }


def _transform(chances: np.ndarray, token: int, rng: np.random.Generator) -> float:
    return float(chances[:token].sum() + rng.random() * chances[token])


def main() -> None:
    asked, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    plant(asked.get("fault"))
    speculation, model = asked.get("speculation"), asked["model"]
    # No draft is cut short for want of room in a pass.
    llm = engine(model, speculation, asked.get("fault") != "unpatched", max_num_batched_tokens=8192)
    given = prompts(llm, asked["data"], asked["prompts"])
    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    witness = Witness(runner, runner.drafter) if speculation else None
    if witness is not None:
        runner.drafter = witness
    params = {"temperature": asked["temperature"], "top_p": asked["top_p"], "max_tokens": 200}
    responses = []
    for _ in range(asked["rounds"]):
        responses += [response for _, response, _ in generate(llm, given, asked["samples"], **params)]
    found = {
        "lengths": np.array([len(response) for response in responses]),
        "first": np.array([(response + [-1] * POSITIONS)[:POSITIONS] for response in responses]),
    }
    if witness is not None:
        end = llm.get_tokenizer().eos_token_id
        found |= transforms(model, witness, asked["temperature"], asked["top_p"], end)
    np.savez(out, **found)


if __name__ == "__main__":
    main()
