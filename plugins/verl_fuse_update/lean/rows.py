"""Handles rows of a batch as verl's workers get it: nested tensors, one row per sample."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from verl.utils.tensordict_utils import index_select_tensor_dict
from verl.workers.utils.padding import response_from_nested

from verl_fuse_update.lean.options import NO_ROW, ROW_FIELD

# The model's output for rows, by a row's place in the batch of its rank: log-probs and entropies of all its tokens.
Outputs = Mapping[int, Mapping[str, torch.Tensor]]
# What says which tokens count; without any, a row's loss and gradient are exactly 0.
MASKS = ("response_mask", "loss_mask")


def lengths(data: Any) -> list[int]:
    """Return the tokens of each row, prompt and response."""
    return data["input_ids"].offsets().diff().tolist()


def selected(data: Any, rows: Sequence[int]) -> Any:
    """Return these rows, with the batch's other data."""
    return index_select_tensor_dict(data, list(rows))


def nested(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one tensor of rows of any lengths."""
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def without_weight(data: Any) -> Any:
    """Return the rows with other masks: no token of them counts, and they are none of the batch's."""
    for name in MASKS:
        if name in data:
            mask = data[name]
            data[name] = torch.nested.nested_tensor_from_jagged(torch.zeros_like(mask.values()), mask.offsets())
    data[ROW_FIELD] = torch.full_like(data[ROW_FIELD], NO_ROW)
    return data


def old_log_probs_of(outputs: Outputs, like: Mapping[str, torch.Tensor], mask: torch.Tensor) -> TensorDict:
    """Return old log-probs and entropy of the rows of `mask`, one value per response token; 0 for a row without output,
    in the precision of `like`, an output of any row: all ranks write the same columns."""
    found = {}
    for name, key in (("old_log_probs", "log_probs"), ("entropy", "entropy")):
        kind = like[key].dtype if like else None
        # Log-probs of a response begin one token before it.
        whole = [
            outputs[row][key].cpu() if row in outputs else torch.zeros(1 + len(tokens), dtype=kind)
            for row, tokens in enumerate(mask.unbind())
        ]
        found[name] = response_from_nested(nested(whole), mask)
    return TensorDict(found, batch_size=[mask.size(0)])
