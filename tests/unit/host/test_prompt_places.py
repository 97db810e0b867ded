"""Prompts of a batch are named as a user finds them in the data."""

import numpy as np
import pytest

pytest.importorskip("verl")
from verl.utils.tensordict_utils import get_tensordict

from verl_fuse.host.rollout.prompts import places_of


def column(values):
    filled = np.empty(len(values), object)
    filled[:] = values
    return filled


def test_a_prompt_is_named_by_its_data_set_and_its_index_or_its_text():
    indices = [0, 12.0, "row-7", None, float("nan"), [3, 4], True, 5]
    texts = ["a", "b", "c", "What\n is 2 + 2?", "x" * 41, "y" * 40, "z", ""]
    messages = [[{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}] for text in texts]
    batch = get_tensordict(
        {
            "uid": column([f"u{row}" for row in range(8)]),
            "data_source": column(["gsm8k"] * 7 + [""]),
            # verl's own column, which is 0 where the data has none.
            "index": column([0] * 8),
            "extra_info": column([{"index": index, "split": "train"} for index in indices]),
            "raw_prompt": column(messages),
        }
    )
    assert places_of(batch) == {
        "u0": "gsm8k index 0",
        "u1": "gsm8k index 12",
        "u2": "gsm8k index row-7",
        "u3": 'gsm8k "What is 2 + 2?"',
        "u4": f'gsm8k "{"x" * 40}…"',
        "u5": f'gsm8k "{"y" * 40}"',
        "u6": 'gsm8k "z"',
        "u7": "index 5",
    }


def test_data_without_an_index_or_a_source_has_the_beginning_of_its_text():
    batch = get_tensordict(
        {
            "uid": column(["u0", "u1"]),
            "index": column([0, 0]),
            "extra_info": column([{"split": "train"}, None]),
            "raw_prompt": column([[{"role": "user", "content": "Add."}], [{"role": "user", "content": "Sort."}]]),
        }
    )
    assert places_of(batch) == {"u0": '"Add."', "u1": '"Sort."'}
    assert places_of(get_tensordict({"uid": column(["u0"])})) == {"u0": ""}
