"""`python -m verl_fuse_cpu.task.smollm2.rates --task DIR` measures how often the task's model answers right at
temperature 1, kind by kind, and how long its responses are.

A response that has ended leaves the batch, so that the long ones do not keep the short ones.
"""

from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from verl_fuse_cpu.task.smollm2.reward import compute_score

AT_ONCE = 64


@torch.inference_mode()
def respond(model: Any, prompts: list[list[int]], end: int, most: int) -> list[list[int]]:
    """Return one response a prompt, at most `most` token ids each, sampled at temperature 1 from torch's seed; `end` is
    the last id of a response that ended by itself."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[end] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    responses: list[list[int]] = [[] for _ in prompts]
    alive, cache = torch.arange(len(prompts)), DynamicCache()
    for _ in range(most):
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1).logits
        drawn = torch.multinomial(logits[:, -1].softmax(-1), 1)
        for row, token in zip(alive.tolist(), drawn[:, 0].tolist(), strict=True):
            responses[row].append(token)
        left = (drawn[:, 0] != end).nonzero()[:, 0]
        if len(left) == 0:
            break
        if len(left) < len(alive):
            cache.batch_select_indices(left)
        alive, ids, mask, positions = alive[left], drawn[left], mask[left], positions[left, -1:] + 1
        mask = torch.cat([mask, mask.new_ones(len(left), 1)], dim=1)
    return responses


def measure(model: Any, tokenizer: Any, rows: list[dict[str, Any]], most: int) -> list[dict[str, Any]]:
    """Answer every problem once; return kind, prompt and response in tokens, text, `ended` and `acc` of each."""
    chats = [
        tokenizer.apply_chat_template(list(row["prompt"]), add_generation_prompt=True, tokenize=False) for row in rows
    ]
    prompts = [tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    # Prompts of about one length share a batch.
    order = sorted(range(len(rows)), key=lambda i: len(prompts[i]))
    found = []
    for first in range(0, len(order), AT_ONCE):
        batch = order[first : first + AT_ONCE]
        responses = respond(model, [prompts[i] for i in batch], tokenizer.eos_token_id, most)
        for i, response in zip(batch, responses, strict=True):
            kind, truth = rows[i]["data_source"], rows[i]["reward_model"]["ground_truth"]
            said = tokenizer.decode(response, skip_special_tokens=True)
            lengths = {"prompt": len(prompts[i]), "response": len(response)}
            ended = response[-1] == tokenizer.eos_token_id
            acc = compute_score(kind, said, truth)["acc"]
            found.append({"kind": kind, **lengths, "text": said, "ended": ended, "acc": acc, "truth": truth})
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown: a line a kind and one for all, lengths as median, 90th and 99th percentile."""
    lines = ["| kind | problems | right | prompt tokens | response tokens | cut off |", "|---|---|---|---|---|---|"]
    for kind in [*dict.fromkeys(sample["kind"] for sample in sorted(found, key=lambda s: s["kind"])), "all"]:
        own = [sample for sample in found if kind in (sample["kind"], "all")]
        tokens = [np.percentile([sample[name] for sample in own], (50, 90, 99)) for name in ("prompt", "response")]
        lengths = " | ".join(", ".join(f"{value:.0f}" for value in three) for three in tokens)
        right, cut = (np.mean([sample["acc"] for sample in own]), np.mean([not sample["ended"] for sample in own]))
        lines.append(f"| {kind} | {len(own)} | {right:.2f} | {lengths} | {cut:.2f} |")
    return lines


def main(
    task: Annotated[Path, typer.Option(help="Directory of the task.")],
    data: Annotated[str, typer.Option(help="File of the directory, without .parquet.")] = "validation",
    problems: Annotated[int, typer.Option(min=1, help="The first problems of the file are answered, each once.")] = 128,
    most: Annotated[int, typer.Option(min=1, help="Tokens after which a response is cut off.")] = 160,
    show: Annotated[int, typer.Option(help="Responses of each kind to print as they are.")] = 0,
) -> None:
    """Measure the model of a task before it is trained."""
    import pandas

    rows = pandas.read_parquet(task / f"{data}.parquet").to_dict("records")[:problems]
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(task / "model")
    found = measure(model, AutoTokenizer.from_pretrained(task / "model"), rows, most)
    shown: dict[str, int] = {}
    for sample in found:
        shown[sample["kind"]] = shown.get(sample["kind"], 0) + 1
        if shown[sample["kind"]] <= show:
            typer.echo(f"{sample['kind']}, {'right' if sample['acc'] else 'wrong'}: {sample['text']!r}")
    typer.echo("\n".join(table(found)))


if __name__ == "__main__":
    typer.run(main)
