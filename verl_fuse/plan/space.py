"""Builds the search space of a plan as flat tables: the options of each call, and their costs.

An option is a configuration of a call (layout, micro-batching, offload) on one mesh of the right size.

Invariants (tests/unit/plan/test_space.py):
- the options of call c are the half-open range begin[c]:begin[c+1] of every flat table;
- two options of one role have the same placement exactly if they have the same mesh and layout, and then share weights;
- a move in the tables has the cost model's seconds for the two meshes and layouts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from numpy.typing import NDArray

from verl_fuse.plan.evaluate import move_index, move_seconds
from verl_fuse.plan.relation import relations
from verl_fuse.plan.tables import PlanTables
from verl_fuse.spec.cluster import Cluster, Mesh
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.plan import CallPlan
from verl_fuse.spec.workload import Call


@dataclass(frozen=True)
class CallConfig:
    """Seconds, and bytes per device: `resident` all step long, `active` while the call runs.

    `copy` is the weights the call needs unless it shares the placement of its role's train call.
    """

    layout: Layout
    microbatches: int
    offload: bool
    seconds: float
    resident: float
    active: float
    copy: float = 0.0

    @property
    def needs(self) -> tuple[float, ...]:
        return (self.seconds, self.resident, self.active, self.copy)

    @property
    def peak(self) -> float:
        """Return the least bytes that a device needs if nothing else runs on it."""
        return self.resident + self.active + self.copy


MoveSeconds = Callable[[str, tuple[Mesh, CallConfig], tuple[Mesh, CallConfig]], float]
"""(role, train call's mesh and configuration, user's) -> seconds to give the user its weights."""


@dataclass(frozen=True)
class PlanSpace:
    """The tables, and the meaning of their rows: option k is configuration `configs[config[k]]` on mesh `mesh[k]`."""

    calls: tuple[Call, ...]
    cluster: Cluster
    configs: tuple[CallConfig, ...]
    meshes: tuple[Mesh, ...]
    config: NDArray[np.int64]
    mesh: NDArray[np.int64]
    tables: PlanTables

    @classmethod
    def build(
        cls,
        calls: Sequence[Call],
        cluster: Cluster,
        configs: Sequence[Sequence[CallConfig]],
        meshes: Sequence[Mesh],
        limit: float,
        shares: bool = True,
        defers: bool = False,
    ) -> "PlanSpace":
        """Build every configuration of every call on every mesh of its size; there is no room for moves yet, and they
        count as free.

        shares: a call on the placement of its train call uses the same weights; False: rollout engines that keep their
        own. defers: the critic may be trained while the next step generates.
        """
        by_size: dict[int, list[int]] = {}
        for index, mesh in enumerate(meshes):
            by_size.setdefault(mesh.size, []).append(index)
        flat = [config for of_call in configs for config in of_call]
        owner = [c for c, of_call in enumerate(configs) for _ in of_call]
        rows = [(w, m) for w, config in enumerate(flat) for m in by_size.get(config.layout.devices, ())]
        config, mesh = np.array(rows, np.int64).reshape(-1, 2).T
        call_of = np.array(owner, np.int64)[config]
        role = [call.role for call in calls]
        shapes: dict[tuple, int] = {}
        placements: dict[tuple, int] = {}
        shape_of_config = [
            shapes.setdefault((role[c], w.layout, w.offload, calls[c].kind == "generate" and not shares), len(shapes))
            for w, c in zip(flat, owner, strict=True)
        ]
        shape = np.array(shape_of_config, np.int64)[config]
        placement = [placements.setdefault((s, m), len(placements)) for s, m in zip(shape, mesh, strict=True)]
        trains = {call.role: c for c, call in enumerate(calls) if call.kind == "train"}
        tables = PlanTables(
            begin=np.searchsorted(call_of, np.arange(len(calls) + 1)).astype(np.int64),
            first=np.array([m.first for m in meshes], np.int64)[mesh],
            end=np.array([m.end for m in meshes], np.int64)[mesh],
            **{name: np.array([getattr(w, name) for w in flat], float)[config] for name in ("seconds", "resident")},
            **{name: np.array([getattr(w, name) for w in flat], float)[config] for name in ("active", "copy")},
            placement=np.array(placement, np.int64),
            shape=shape,
            base=np.zeros((len(shapes), len(shapes)), np.int64),
            moves=np.zeros(relations(cluster.devices, 1, 1)),
            before=np.array([[a.name in b.after for b in calls] for a in calls]),
            source=np.array([trains.get(c.role, -1) if c.kind != "train" else -1 for c in calls], np.int64),
            devices=cluster.devices,
            node=cluster.devices_per_node,
            limit=float(limit),
            deferred=trains.get("critic", -1) if defers else -1,
        )
        return cls(tuple(calls), cluster, tuple(flat), tuple(meshes), config, mesh, tables)

    def keep(self, options: NDArray[np.bool_]) -> "PlanSpace":
        """Return the space with only these options."""
        t = self.tables
        flat = ("first", "end", "seconds", "resident", "active", "copy", "placement", "shape")
        begin = np.concatenate([[0], np.cumsum(options)])[t.begin].astype(np.int64)
        tables = t._replace(begin=begin, **{name: getattr(t, name)[options] for name in flat})
        return replace(self, config=self.config[options], mesh=self.mesh[options], tables=tables)

    @property
    def room(self) -> int:
        """Return the number of entries that `with_room_for_moves` lays out."""
        return self._layout()[1]

    def with_room_for_moves(self) -> "PlanSpace":
        """Lay out `moves` for every pair of shapes of a train call and of a call that uses its weights; nothing is
        filled in."""
        base, total = self._layout()
        return replace(self, tables=self.tables._replace(base=base, moves=np.full(total, np.nan)))

    def _layout(self) -> tuple[NDArray[np.int64], int]:
        t, node = self.tables, self.cluster.devices_per_node
        base = np.zeros_like(t.base)
        size = {int(s): self.configs[self.config[k]].layout.devices for k, s in enumerate(t.shape)}
        shapes = [np.unique(t.shape[t.begin[c] : t.begin[c + 1]]).tolist() for c in range(len(self.calls))]
        total = 0
        for user, train in enumerate(t.source):
            for a, b in product(shapes[train], shapes[user]) if train >= 0 else ():
                base[a, b] = total
                total += relations(size[a], size[b], node)
        return base, total

    def fill(self, move: MoveSeconds, choice: Sequence[int] | NDArray[np.int64]) -> None:
        """Fill in, in place, the moves of a plan given as options."""
        for user in range(len(self.calls)):
            self.fill_one(move, choice, user)

    def fill_one(self, move: MoveSeconds, choice: Sequence[int] | NDArray[np.int64], user: int) -> None:
        """Fill in the move of one call of a plan."""
        t, train = self.tables, self.tables.source[user]
        if train < 0 or not np.isnan(move_seconds(t, choice[train], choice[user])):
            return
        source, target = (
            (self.meshes[self.mesh[o]], self.configs[self.config[o]]) for o in (choice[train], choice[user])
        )
        t.moves[move_index(t, choice[train], choice[user])] = move(self.calls[user].role, source, target)

    def plan(self, choice: Sequence[int]) -> tuple[CallPlan, ...]:
        """Return the calls of a plan given as options."""
        placed = ((self.meshes[self.mesh[option]], self.configs[self.config[option]]) for option in choice)
        return tuple(
            CallPlan(call.name, mesh, config.layout, config.microbatches, config.offload)
            for call, (mesh, config) in zip(self.calls, placed, strict=True)
        )
