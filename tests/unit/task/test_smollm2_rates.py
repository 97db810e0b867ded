"""How the rates of a model are measured, on a model of a few thousand parameters."""

import pytest

torch = pytest.importorskip("torch")
rates = pytest.importorskip("verl_fuse_cpu.task.smollm2.rates")
warm_start = pytest.importorskip("verl_fuse_cpu.task.warm_start")


def test_a_response_in_a_batch_is_the_one_that_the_model_gives_alone():
    from verl_fuse_cpu.task.tokenizer import build_tokenizer

    torch.manual_seed(0)
    model = warm_start.build_model(build_tokenizer(), layers=2).eval()
    # Sampling then takes the likeliest token.
    model.lm_head.weight.data *= 1e4
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14, 15, 16, 17], [60] * 12]
    alone = [
        model.generate(torch.tensor([prompt]), do_sample=False, eos_token_id=-1, max_new_tokens=20)[0, len(prompt) :]
        for prompt in prompts
    ]
    # An id that some responses have early and some never: the former leave the batch.
    end = int(alone[0][3])
    expected = [ids[: ids.index(end) + 1] if end in ids else ids for ids in (row.tolist() for row in alone)]
    assert min(map(len, expected)) < max(map(len, expected))
    assert rates.respond(model, prompts, end, most=20) == expected


def test_a_table_has_a_line_a_kind_and_one_for_all():
    found = [
        {"kind": kind, "prompt": 40, "response": tokens, "ended": tokens < 160, "acc": acc}
        for kind, tokens, acc in (("sum", 4, 1.0), ("sum", 6, 0.0), ("story", 160, 0.0))
    ]
    assert rates.table(found) == [
        "| kind | problems | right | prompt tokens | response tokens | cut off |",
        "|---|---|---|---|---|---|",
        "| story | 1 | 0.00 | 40, 40, 40 | 160, 160, 160 | 1.00 |",
        "| sum | 2 | 0.50 | 40, 40, 40 | 5, 6, 6 | 0.00 |",
        "| all | 3 | 0.33 | 40, 40, 40 | 6, 129, 157 | 0.33 |",
    ]
