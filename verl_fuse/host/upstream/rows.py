"""Reads fields of a TransferQueue batch, and takes parts of its rows."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

from verl_fuse.spec.trajectory import TrajectoryKey

TRAIN = "train"


def read(batch: KVBatchMeta, fields: Sequence[str]) -> Any:
    """Return the TensorDict of `fields` for all rows of `batch`; a field that any row lacks is absent from it
    (TransferQueue intersects)."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id or TRAIN, select_fields=list(fields))


def rows(keys: Sequence[str], tags: Mapping[str, dict], extra_info: Mapping[str, Any] | None) -> KVBatchMeta:
    """Return a batch of `keys` in the given order, with all their fields."""
    info: dict[str, Any] = dict(extra_info or {})
    return KVBatchMeta(keys=list(keys), tags=[dict(tags[key]) for key in keys], partition_id=TRAIN, extra_info=info)


def tags_of(batch: KVBatchMeta) -> dict[str, dict]:
    """Return tags by key."""
    return dict(zip(batch.keys, batch.tags, strict=True))


def as_index(value: Any) -> int | str | None:
    """Return what the data set gives as a row's `index` as a number, or else as text; verl reads none of it, and data
    has nulls, NaN and lists there."""
    if value is None or isinstance(value, str):
        return value
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return str(value)


def prompt_indices(batch: KVBatchMeta) -> list[int | str | None]:
    """Return the data set's index of each prompt group that has a sample in the batch; none where the rows have no
    such field."""
    tags = tags_of(batch)
    first_of_group = {TrajectoryKey.parse(key).uid: key for key in batch.keys if not tags[key].get("is_padding")}
    found = tq.kv_batch_get(
        keys=list(first_of_group.values()), partition_id=batch.partition_id or TRAIN, select_fields=["index"]
    )
    return [as_index(index) for index in found["index"]] if "index" in found.keys() else []  # noqa: SIM118


def lengths_by_source(batch: KVBatchMeta, sources: Mapping[str, str]) -> dict[str, list[tuple[int, int]]]:
    """Return (prompt, response) tokens of the batch's trajectories by data set, with the trajectories of a prompt
    together; `sources` maps a prompt uid to its data set, and a uid that is not in it counts as of the data set ""."""
    found: dict[str, list[tuple[int, int]]] = {}
    for key, tag in sorted(tags_of(batch).items(), key=lambda row: TrajectoryKey.parse(row[0]).uid):
        if not tag.get("is_padding"):
            source = sources.get(TrajectoryKey.parse(key).uid, "")
            found.setdefault(source, []).append((int(tag["prompt_len"]), int(tag["response_len"])))
    return found


def response_tokens(tags: Mapping[str, dict]) -> dict[str, list[int]]:
    """Return prompt uid -> response tokens of each of its samples, by the tags of its trajectories: trajectories of a
    session count together."""
    groups: dict[str, Counter[int]] = {}
    for key, tag in tags.items():
        if not tag.get("is_padding"):
            uid, session, _ = TrajectoryKey.parse(key)
            groups.setdefault(uid, Counter())[session] += int(tag["response_len"])
    return {uid: list(sessions.values()) for uid, sessions in groups.items()}
