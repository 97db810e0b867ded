"""Random op lists, delays, sizes and depths on four processes: nothing deadlocks, everything is bitwise
what serial training gives."""

import random
from collections.abc import Mapping

import pytest
import torch
from ranks import Ranks, World
from toy import Toy, random_orders, random_problem, stages_of

from verl_fuse.runtime.executor import Executor
from verl_fuse.runtime.lower import lower

CASES = 200
# The problem of this seed: an actor of 4 stages with 5 micro-batches, and two critics of 2 stages.
SEED = 1
DELAYS = (0.0, 0.0, 0.0, 0.001, 0.003)


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as ranks:
        yield ranks


def run(world: World, seed: int, reads: Mapping[tuple[int, int], int]) -> tuple[dict, dict]:
    """Gradients by (pipeline, stage) and losses by (pipeline, micro-batch) of this rank after a random program."""
    draw = random.Random(seed)
    problem = random_problem(draw)
    program = lower(problem, random_orders(problem, draw))
    links = world.links([p.ranks for p in problem.pipelines])
    stages = stages_of(world, Toy(problem, seed, reads), DELAYS)
    Executor(program, world.rank, links, world.watch(), depth=draw.choice([1, 2, 4])).run(stages)
    gradients = {(i, problem.pipelines[i].ranks.index(world.rank)): stage.weight.grad for i, stage in stages.items()}
    return gradients, {(i, m): loss for i, stage in stages.items() for m, loss in stage.losses.items()}


def serial(seed: int) -> tuple[dict, dict]:
    return Toy(random_problem(random.Random(seed)), seed).serial()


def differences(world: World, seeds: range, reads: Mapping[tuple[int, int], int]) -> list[tuple[int, str, int, int]]:
    """Return gradients and losses of this rank that are not bitwise those of serial training."""
    found = []
    for seed in seeds:
        for name, ours, wanted in zip(("gradient", "loss"), run(world, seed, reads), serial(seed), strict=True):
            found += [(seed, name, *key) for key, value in ours.items() if not torch.equal(value, wanted[key])]
    return found


def test_every_random_program_is_bitwise_serial_training(ranks: Ranks):
    assert ranks.call(differences, range(CASES), {}) == [[], [], [], []]


def test_a_wrong_micro_batch_is_seen_in_its_loss_and_in_all_gradients_of_its_pipeline(ranks: Ranks):
    gradients = [[(SEED, "gradient", 0, stage)] for stage in range(4)]
    gradients[3].append((SEED, "loss", 0, 3))
    assert ranks.call(differences, range(SEED, SEED + 1), {(0, 3): 0}) == gradients


def rounding(world: World, order: list[int]) -> tuple[bool, bool, bool]:
    """Whether this rank's actor gradient is equal, and close, to the serial one, and its losses are the
    serial ones in the new order."""
    gradients, losses = run(world, SEED, {(0, m): source for m, source in enumerate(order)})
    wanted, wanted_losses = serial(SEED)
    key = 0, world.rank
    return (
        torch.equal(gradients[key], wanted[key]),
        torch.allclose(gradients[key], wanted[key]),
        all(torch.equal(losses[0, m], wanted_losses[0, source]) for m, source in enumerate(order) if (0, m) in losses),
    )


def test_a_permuted_order_of_micro_batches_is_seen_in_the_rounding_of_gradients(ranks: Ranks):
    assert ranks.call(rounding, [0, 1, 2, 3, 4]) == [(True, True, True)] * 4
    assert ranks.call(rounding, [3, 0, 4, 2, 1]) == [(False, True, True)] * 4
