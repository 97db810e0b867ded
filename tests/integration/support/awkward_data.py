"""verl's data set, with columns that stock verl trains on: an index that is no number, and samples by prompt."""

from typing import Any

from awkward import INDICES, SAMPLES
from verl.utils.dataset.rl_dataset import RLHFDataset


class AwkwardDataset(RLHFDataset):
    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        place = int(row["index"]) % len(INDICES)
        index = {"index": INDICES[place]}
        return {**row, **index, "extra_info": index, "__rollout_n__": SAMPLES[place], "place": place}
