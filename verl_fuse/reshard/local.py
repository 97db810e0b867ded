"""Has helpers that place pieces in local tensors: collecting pieces by tensor, the fused projection of query, key and
value, and the cells of tensor-parallel ranks."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from verl_fuse.reshard.parameters import Parameter, ParameterKind
from verl_fuse.reshard.sharding import Cells, LocalTensor, Owners, Piece, by_columns, by_rows, even_cuts
from verl_fuse.spec.model import Model

# Name and shape of a local tensor, and a piece in it.
Entry = tuple[str, tuple[int, ...], Piece]


def collected(entries: Iterable[Entry]) -> tuple[LocalTensor, ...]:
    """Return local tensors made from their pieces, in order of first appearance."""
    found: dict[str, tuple[tuple[int, ...], list[Piece]]] = {}
    for name, shape, piece in entries:
        found.setdefault(name, (shape, []))[1].append(piece)
    return tuple(LocalTensor(name, shape, tuple(pieces)) for name, (shape, pieces) in found.items())


def shape_of(parameter: Parameter, rows: int, columns: int) -> tuple[int, ...]:
    """Return the shape of a local part: a part of a parameter with one column (a bias or a norm) is a vector."""
    return (rows,) if parameter.columns == 1 else (rows, columns)


def row_block(parameter: Parameter, row: int, rows: int, before: int = 0) -> Piece:
    """Return a piece of whole rows, with `before` rows of the local tensor ahead of them."""
    return Piece(parameter.name, row, rows, 0, parameter.columns, before * parameter.columns, parameter.columns)


def column_block(parameter: Parameter, column: int, columns: int) -> Piece:
    """Return a piece with all rows of some columns, which make up the local tensor."""
    return Piece(parameter.name, 0, parameter.rows, column, columns, 0, columns)


@dataclass(frozen=True, slots=True)
class HeadRows:
    """Rows of a query, key or value projection on tensor rank `rank`; they begin at row `local`
    of its fused projection."""

    kind: ParameterKind
    row: int
    rows: int
    rank: int
    local: int


@lru_cache(maxsize=1024)
def grouped_heads(heads: int, kv_heads: int, head_dim: int, tp: int) -> tuple[HeadRows, ...]:
    """Return rows in Megatron's order: for each key head its queries, the key, the value; the whole is cut into `tp`
    equal parts, wherever the cuts fall.

    Source: mbridge `Bridge._weight_to_mcore_format`; megatron-core
    `SelfAttention.get_query_key_value_tensors` for tp > kv_heads.
    """
    share, queries = (heads + 2 * kv_heads) * head_dim // tp, heads // kv_heads * head_dim
    found = []
    for group in range(kv_heads):
        begin = group * (queries + 2 * head_dim)
        parts: tuple[tuple[ParameterKind, int, int], ...] = (
            ("query", group * queries, queries),
            ("key", group * head_dim, head_dim),
            ("value", group * head_dim, head_dim),
        )
        for kind, row, rows in parts:
            for rank in range(begin // share, (begin + rows - 1) // share + 1):
                low, high = max(begin, rank * share), min(begin + rows, (rank + 1) * share)
                found.append(HeadRows(kind, row + low - begin, high - low, rank, low - rank * share))
            begin += rows
    return tuple(found)


@lru_cache(maxsize=1024)
def stacked_heads(heads: int, kv_heads: int, head_dim: int, tp: int) -> tuple[HeadRows, ...]:
    """Return rows in vLLM's order: a rank's queries, then its keys, then its values; fewer key heads than ranks are
    repeated (`QKVParallelLinear`)."""
    queries, keys = heads * head_dim // tp, max(1, kv_heads // tp) * head_dim
    found = []
    for rank in range(tp):
        first_key = rank * kv_heads // tp * head_dim
        found += [
            HeadRows("query", rank * queries, queries, rank, 0),
            HeadRows("key", first_key, keys, rank, queries),
            HeadRows("value", first_key, keys, rank, queries + keys),
        ]
    return tuple(found)


def head_rows(model: Model, tp: int, fused: str) -> tuple[HeadRows, ...]:
    """Return the rows of all tensor ranks in the order `fused`: grouped (Megatron) or stacked (vLLM)."""
    order = grouped_heads if fused == "grouped" else stacked_heads
    return order(model.heads, model.kv_heads, model.head_dim, tp)


def head_owners(found: tuple[HeadRows, ...], kind: ParameterKind) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    """Yield (first row, rows, tensor ranks that have them) of one projection, in order of rows."""
    ranks: dict[tuple[int, int], list[int]] = {}
    for each in found:
        if each.kind == kind:
            ranks.setdefault((each.row, each.rows), []).append(each.rank)
    for (row, rows), owners in sorted(ranks.items()):
        yield row, rows, tuple(owners)


def tensor_parallel_cells(
    parameter: Parameter,
    padded: int,
    tp: int,
    heads: tuple[HeadRows, ...],
    owners: Callable[[tuple[int, ...]], Owners],
) -> Cells:
    """Return the cells of a parameter that tensor ranks share.

    `padded` counts its rows with padding, which no cell has; `owners` gives the ranks behind tensor ranks.
    """
    single = [owners((rank,)) for rank in range(tp)]
    if parameter.kind in ("query", "key", "value"):
        parts = list(head_owners(heads, parameter.kind))
        return by_rows(parameter, [row for row, _, _ in parts] + [parameter.rows], [owners(t) for _, _, t in parts])
    if parameter.kind in ("embedding", "head", "column"):
        return by_rows(parameter, [min(cut, parameter.rows) for cut in even_cuts(padded, tp)], single)
    if parameter.kind == "row":
        return by_columns(parameter, even_cuts(parameter.columns, tp), single)
    return by_rows(parameter, (0, parameter.rows), [owners(tuple(range(tp)))])
