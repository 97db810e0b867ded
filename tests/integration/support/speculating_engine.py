"""A real vLLM engine in this process that drafts from history: `python speculating_engine.py '{JSON}'`
prints what it did as JSON.

Steps are numbered as the driver would.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

from verl_fuse_speculation.engine import engine_arguments
from verl_fuse_speculation.shelf import say_step

# One process, one thread: `make test` has two cores for all its workers.
os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    OMP_NUM_THREADS="1",
)


def kernel() -> dict[str, list[list[float]]]:
    """Logits of drafted positions, processed as shipped and as patched: of a request with two drafted tokens and of one
    with three, at temperatures 0.5 and 2.0, and, as patched, the second without its least likely token."""
    import torch
    import vllm.utils.cpu_triton_utils as kernels
    import vllm.v1.sample.rejection_sampler as sampler
    from vllm.platforms import current_platform

    from verl_fuse_patches import registry

    class Metadata:
        all_greedy = False
        temperature = torch.tensor([0.5, 2.0])
        top_k: Any = None
        top_p = None

    def processed(top_k: Any) -> list[list[float]]:
        Metadata.top_k = top_k
        # As vLLM takes it from there: since 0.31 the platform, before it the model runner.
        if register := getattr(current_platform, "register_triton_kernel_overrides", None):
            register()
        else:
            sampler.expand_kernel = kernels.expand_kernel
        logits = torch.tensor([[1.0, 2.0, 3.0]] * 5)
        return sampler.apply_sampling_constraints(logits, torch.tensor([2, 5], dtype=torch.int32), Metadata()).tolist()

    # A top-k that is left-over memory would be an error.
    shipped = processed(None)
    registry.install([registry.load("vllm_cpu_expand")])
    return {"shipped": shipped, "patched": processed(torch.tensor([3, 2], dtype=torch.int32))}


def multiplied() -> float:
    """Return the largest difference between torch's results and vLLM's multiplication of rounded numbers of rows."""
    import torch
    from vllm.platforms import current_platform

    from verl_fuse_patches import registry

    current_platform.import_kernels()
    registry.install([registry.load("vllm_cpu_rows")])
    import vllm._custom_ops as operations

    weight, bias, worst = torch.randn(48, 32), torch.randn(48), 0.0
    handler = operations.create_onednn_mm(weight.t(), 32)
    for rows in (1, 2, 8, 37, 130):
        x = torch.randn(rows, 32)
        found, expected = operations.onednn_mm(handler, x, bias), torch.nn.functional.linear(x, weight, bias)
        worst = max(worst, float((found - expected).abs().max()) if found.shape == expected.shape else float("inf"))
    return worst


def engine(model: str, speculation: dict[str, Any] | None, patched: bool = True, **kwargs: Any) -> Any:
    """vLLM's own, in float32; `speculation` is the block that drafters get."""
    from verl_fuse_patches import registry

    kernels = ["vllm_cpu_recovered", "vllm_cpu_rows", *(["vllm_cpu_expand"] if patched else [])]
    registry.install(map(registry.load, kernels))
    from vllm import LLM

    extra = engine_arguments(**speculation) if speculation else {}
    return LLM(
        model=model,
        max_model_len=512,
        enforce_eager=True,
        distributed_executor_backend="uni",
        dtype="float32",
        disable_log_stats=False,
        **extra,
        **kwargs,
    )


def prompts(engine: Any, data: str, count: int) -> list[list[int]]:
    """The first prompts of a task, as verl gives them to vLLM."""
    import pyarrow.parquet as pq

    tokenizer = engine.get_tokenizer()
    rows = pq.read_table(data).to_pylist()[:count]
    return [
        list(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=True)["input_ids"])
        for row in rows
    ]


def passes(engine: Any) -> int:
    """Return the number of forward passes of the engine."""
    return sum(m.count for m in engine.get_metrics() if m.name.endswith("iteration_tokens_total"))


def difference(model: str, samples: list[tuple[list[int], list[int], list[float]]], temperature: float) -> float:
    """The largest difference of the samples' log-probs to what transformers computes for prompt and response."""
    import torch
    from transformers import AutoModelForCausalLM

    reference, worst = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), 0.0
    for prompt, response, found in samples:
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(response)[:, None])[:, 0]
        worst = max(worst, float((expected - torch.tensor(found)).abs().max()))
    return worst


def generate(
    engine: Any, given: list[list[int]], samples: int, **params: Any
) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, response, log-probs) of `samples` samples of each prompt."""
    from vllm import SamplingParams

    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in given],
        SamplingParams(n=samples, logprobs=0, **params),
        use_tqdm=False,
    )
    return [
        (
            list(output.prompt_token_ids),
            list(sample.token_ids),
            [found[token].logprob for found, token in zip(sample.logprobs, sample.token_ids, strict=True)],
        )
        for output in outputs
        for sample in output.outputs
    ]


def by_request(engine: Any, given: list[list[int]]) -> dict[str, dict[str, Any]]:
    """Return results for parameters of single requests, decoded greedily one token a pass and then with drafts of that:
    tokens per pass with drafts, whether tokens, text and ending are the same, and the largest difference of log-probs.
    """
    import torch
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    worker = engine.llm_engine.model_executor.driver_worker
    drafter = getattr(worker, "worker", worker).model_runner.drafter
    most = drafter._most

    def ask(prompts: list[list[int]], **params: Any) -> list[Any]:
        asked = SamplingParams(logprobs=0, **{"temperature": 0.0, "max_tokens": 96} | params)
        found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], asked, use_tqdm=False)
        return [output.outputs[0] for output in found]

    def apart(one: Any, other: Any) -> float:
        rows = (
            [found[token].logprob for found, token in zip(out.logprobs, out.token_ids, strict=True)]
            for out in (one, other)
        )
        return float((torch.tensor(next(rows)) - torch.tensor(next(rows))).abs().max())

    drafter._most = 0
    plain = ask(given)
    # Words of the middle of long responses: however short the model's own responses are, a request that goes on to 96
    # tokens meets them.
    long = {"ignore_eos": True}
    without_end = ask(given, **long)
    words = sorted({out.text[len(out.text) // 2 :][:4] for out in without_end})
    often = max(plain[0].token_ids, key=plain[0].token_ids.count)
    params: dict[str, dict[str, Any]] = {
        "stop": {"stop": words} | long,
        "stop, kept in the text, not at once": {"stop": words, "include_stop_str_in_output": True, "min_tokens": 12}
        | long,
        "presence": {"presence_penalty": 1.5, "min_tokens": 60},
        "frequency": {"frequency_penalty": 0.7, "min_tokens": 60},
        "repetition": {"repetition_penalty": 1.3, "min_tokens": 60},
        "bad words": {"bad_words": words[:2]} | long,
        "seed": {"temperature": 1.0, "seed": 7},
        "least": {"min_tokens": 60},
        "allowed": {"allowed_token_ids": [token for token in range(3, len(engine.get_tokenizer())) if token != often]},
        "structured": {"structured_outputs": StructuredOutputsParams(regex=r"[0-9 ]{40,60}")},
    }
    result = {}
    for name, wanted in params.items():
        drafter._most = 0
        one = ask(given, **wanted)
        drafter._most, before = most, passes(engine)
        other = ask(given, **wanted)
        tokens = max(len(out.token_ids) for out in other)
        alike = without_end if "ignore_eos" in wanted else plain
        result[name] = {
            "tokens_per_pass": tokens / max(passes(engine) - before, 1),
            "same": all(
                (list(a.token_ids), a.text, a.finish_reason, a.stop_reason)
                == (list(b.token_ids), b.text, b.finish_reason, b.stop_reason)
                for a, b in zip(one, other, strict=True)
            ),
            "ended_by_text": sum(isinstance(out.stop_reason, str) for out in other),
            "changed": sum(list(a.token_ids) != list(b.token_ids) for a, b in zip(alike, one, strict=True)),
            "difference": max(apart(a, b) for a, b in zip(one, other, strict=True)) if len(one) else 0.0,
        }
    return result


def main() -> None:
    asked = json.loads(sys.argv[1])
    kernels, worst = (kernel(), multiplied()) if asked.get("kernel") else (None, None)
    speculation = asked["speculation"]
    llm = engine(asked["model"], speculation, logprobs_mode="processed_logprobs")
    given = prompts(llm, asked["data"], asked["prompts"])
    generate(llm, given[:1], 1, max_tokens=4)
    result: dict[str, Any] = {"kernel": kernels, "multiplied": worst, "passes": [], "lengths": []}
    for step in range(asked["steps"]):
        say_step(Path(speculation["folder"]), step + 1)
        before = passes(llm)
        found = generate(llm, given, asked["samples"], temperature=asked["temperature"], max_tokens=200)
        result["passes"].append(passes(llm) - before)
        result["lengths"].append([len(response) for _, response, _ in found])
    result["difference"] = difference(asked["model"], found, asked["temperature"])
    say_step(Path(speculation["folder"]), asked["steps"] + 1)
    # A sample that goes on elsewhere has what it generated as its prompt.
    begun = [prompt + response[: len(response) // 2] for prompt, response, _ in found if len(response) > 8]
    moved = generate(llm, begun, 1, temperature=asked["temperature"], max_tokens=200)
    result["moved_difference"] = difference(asked["model"], moved, asked["temperature"])
    config = llm.llm_engine.vllm_config
    hashed = config.compute_hash()
    config.speculative_config.draft_load_config.download_dir += " of another run"
    result["hash_is_of_one_run"] = config.compute_hash() != hashed
    if asked.get("by_request"):
        result["by_request"] = by_request(llm, given)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
