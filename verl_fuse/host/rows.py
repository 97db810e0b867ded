"""Rows of a TransferQueue batch: reading fields, taking parts."""

from collections.abc import Mapping, Sequence
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta

TRAIN = "train"


def read(batch: KVBatchMeta, fields: Sequence[str]) -> Any:
    """The TensorDict of `fields` for all rows of `batch`; a field that any row lacks is absent from it (TransferQueue intersects)."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id or TRAIN, select_fields=list(fields))


def rows(keys: Sequence[str], tags: Mapping[str, dict], extra_info: Mapping[str, Any] | None) -> KVBatchMeta:
    """A batch of `keys` in the given order, with all their fields."""
    info: dict[str, Any] = dict(extra_info or {})
    return KVBatchMeta(keys=list(keys), tags=[dict(tags[key]) for key in keys], partition_id=TRAIN, extra_info=info)


def tags_of(batch: KVBatchMeta) -> dict[str, dict]:
    """Tags by key."""
    return dict(zip(batch.keys, batch.tags, strict=True))
