"""Finds the ranks of a transfer that are on one node."""

from verl_fuse.runtime.watch import Watch


def node_numbers(watch: Watch, node: str) -> tuple[int, ...]:
    """Return the node of every rank, numbered in order of ranks; `node` names this rank's node. The call is a program
    of the watch, with all its ranks."""
    with watch.program():
        names = watch.gather("node", node)
    found = {name: number for number, name in enumerate(dict.fromkeys(names[rank] for rank in watch.ranks))}
    return tuple(found[names[rank]] for rank in watch.ranks)
