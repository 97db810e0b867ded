"""Killed, stuck and disagreeing ranks in a transfer: all others end within the timeout and name the culprit, and nobody
takes a mixture for weights."""

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from ranks import Outcome, Ranks, World
from transfers import LLAMA, content, different, opened, placed, planned, tensors_of, transfer

import verl_fuse.runtime.reshard.transfer as module
from verl_fuse.errors import FuseError
from verl_fuse.reshard.program import TransferProgram
from verl_fuse.runtime.guard import EXIT_CODE
from verl_fuse.runtime.reshard.messages import Packer
from verl_fuse.runtime.reshard.version import WeightVersion

RANKS = 4
TIMEOUT = 3.0
PATIENCE = 60.0
# Two training ranks, two that generate; small messages, so that a fault falls into the middle.
PROGRAM = planned(LLAMA, placed("fsdp 2", LLAMA), placed("vllm tp2", LLAMA, 2), RANKS, bucket=20_000)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[Ranks]:
    with Ranks(RANKS, tmp_path) as ranks:
        yield ranks


class Faulty(Packer):
    """Unpacks five messages, then does something else."""

    count = 0
    fault = staticmethod(lambda: None)

    def unpack(self, *args) -> None:
        self.count += 1
        if self.count > 5:
            self.fault()
        super().unpack(*args)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stick() -> None:
    time.sleep(600)


def fail() -> None:
    raise ValueError("disk full")


def hold(world: World, program: TransferProgram, version: int) -> tuple:
    """Source and target tensors and the version that the target holds, which is 1."""
    weights, rank = program.weights, world.rank
    source = tensors_of(program.source, weights, rank, content(weights, version))
    target = tensors_of(program.target, weights, rank, content(weights, 1))
    return source, target, WeightVersion("rollout", 1)


def interrupted(world: World, culprit: int, fault) -> dict:
    """A transfer of version 2 in which the culprit meets its fault; what is left on this rank."""
    if world.rank == culprit:
        module.Packer = type("Culprit", (Faulty,), {"fault": staticmethod(fault)})
    source, target, held_version = hold(world, PROGRAM, 2)
    before = {name: tensor.clone() for name, tensor in source.items()}
    mover = transfer(PROGRAM, opened(world, "first", TIMEOUT))
    begun, error = time.monotonic(), ""
    try:
        mover.run(source, target, 2 if source else None, held_version)
    except (FuseError, ValueError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    refusal = ""
    try:
        held_version.require(1)
    except FuseError as caught:
        refusal = str(caught)
    return {
        "error": error,
        "seconds": time.monotonic() - begun,
        "intact": different(source, before) == [],
        "version": held_version.version,
        "refusal": refusal,
    }


def ended(ranks: Ranks, culprit: int, fault) -> list[Outcome]:
    ranks.start(interrupted, culprit, fault)
    return ranks.outcomes(TIMEOUT + PATIENCE)


def test_a_killed_receiver_ends_the_transfer_loudly_and_weights_are_nobodys(ranks: Ranks):
    outcomes = ended(ranks, 3, die)
    assert outcomes[3].exit_code == -signal.SIGKILL
    for rank in (0, 1, 2):
        left = outcomes[rank].value
        assert "weight transfer stopped: rank 3 closed its connection to rank" in left["error"]
        assert left["seconds"] < TIMEOUT + PATIENCE
        assert left["intact"]
    # Rank 2 had begun to write.
    assert outcomes[2].value["version"] is None
    assert outcomes[2].value["refusal"] == (
        "weights 'rollout': version 1 is needed, they are incomplete: a transfer was not finished"
    )


def test_a_stuck_receiver_is_named_and_ended(ranks: Ranks):
    outcomes = ended(ranks, 3, stick)
    assert outcomes[3].exit_code == EXIT_CODE
    for rank in (0, 1, 2):
        assert re.search(
            r"weight transfer stopped: rank \d waited 3\.\d s .*: rank 3 has been running",
            outcomes[rank].value["error"],
        )
        assert outcomes[rank].value["intact"]
    assert outcomes[2].value["version"] is None


def test_a_failing_rank_raises_its_own_error_and_is_named_by_all_others(ranks: Ranks):
    outcomes = ended(ranks, 2, fail)
    assert outcomes[2].value["error"] == "ValueError: disk full"
    for rank in (0, 1, 3):
        assert "rank 2 failed at" in outcomes[rank].value["error"]
        assert "ValueError: disk full" in outcomes[rank].value["error"]


def retried(world: World) -> list[str]:
    """After a fault the same processes, on a port and a watch of their own: version 2 again, then what differs."""
    module.Packer = Packer
    source, target, held_version = hold(world, PROGRAM, 2)
    mover = transfer(PROGRAM, opened(world, "second", 30.0))
    mover.run(source, target, 2 if source else None, held_version)
    held_version.require(2)
    expected = tensors_of(PROGRAM.target, LLAMA, world.rank, content(LLAMA, 2))
    return different(target, expected)


def test_the_next_transfer_brings_intact_weights(ranks: Ranks):
    outcomes = ended(ranks, 2, fail)
    assert all(outcome.value["intact"] for outcome in outcomes)
    assert ranks.call(retried) == [[]] * RANKS


def disagreeing(world: World, what: str) -> str:
    program, version, options = PROGRAM, 2, {}
    if world.rank == 1 and what == "versions":
        version = 3
    elif world.rank == 1 and what == "programs":
        program = planned(LLAMA, PROGRAM.source, PROGRAM.target, RANKS, bucket=40_000)
    elif world.rank == 1 and what == "use of checksums":
        options = {"checksums": True}
    source, target, held_version = hold(world, program, 2)
    mover = transfer(program, opened(world, what, TIMEOUT), **options)
    with pytest.raises(FuseError) as caught:
        mover.run(source, target, version if source else None, held_version)
    held_version.require(1)
    assert different(target, tensors_of(program.target, LLAMA, world.rank, content(LLAMA, 1))) == []
    return str(caught.value)


def test_ranks_that_disagree_stop_before_the_first_write(ranks: Ranks):
    for what in ("versions", "programs", "use of checksums"):
        for error in ranks.call(disagreeing, what):
            assert f"weight transfer stopped: ranks have different {what}: " in error


class Garbled(Packer):
    """Changes a byte after the checksum was made."""

    def pack(self, *args) -> torch.Tensor:
        packed = super().pack(*args)
        packed[0] ^= 1
        return packed


def garbled(world: World) -> tuple[str, int | None]:
    if world.rank == 1:
        module.Packer = Garbled
    source, target, held_version = hold(world, PROGRAM, 2)
    with pytest.raises(FuseError) as caught:
        transfer(PROGRAM, opened(world, "garbled", TIMEOUT), checksums=True).run(
            source, target, 2 if source else None, held_version
        )
    return str(caught.value), held_version.version


def test_a_wrong_checksum_names_the_message_and_leaves_no_version(ranks: Ranks):
    outcomes = ranks.call(garbled)
    assert any(
        re.match(r"message of round \d+ from rank 1 to rank [23]: wrong checksum", error) for error, _ in outcomes
    )
    assert all("from rank 1 to rank" in error for error, _ in outcomes)
    assert [outcomes[2][1], outcomes[3][1]] == [None, None]
