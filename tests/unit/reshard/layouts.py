"""Small models, and random layouts of them."""

import random

from verl_fuse.errors import FuseError
from verl_fuse.reshard.fsdp import FsdpSharding
from verl_fuse.reshard.megatron import MegatronSharding
from verl_fuse.reshard.parameters import ModelParameters, parameters_of
from verl_fuse.reshard.sharding import PlacedSharding, Sharding
from verl_fuse.reshard.vllm import VllmSharding
from verl_fuse.spec.layout import Layout
from verl_fuse.spec.model import Model

# Few elements, but every feature: grouped queries, biases, a tied head, uneven blocks, a vocabulary
# that needs padding, experts.
QWEN2 = parameters_of(Model("small-qwen2", 5, 16, 8, 2, 4, 48, 120, tied_embeddings=True), "qwen2")
LLAMA = parameters_of(Model("small-llama", 8, 24, 8, 8, 4, 64, 128), "llama")
QWEN3 = parameters_of(Model("small-qwen3", 4, 16, 16, 4, 2, 32, 100), "qwen3")
MOE = parameters_of(Model("small-moe", 4, 16, 8, 4, 4, 16, 96, False, 8, 2, 32), "qwen2_moe")
CRITIC = parameters_of(QWEN2.model.as_value_model(), "qwen2", head_bias=True)
SMALL = (QWEN2, LLAMA, QWEN3, MOE, CRITIC)


def fits(sharding: Sharding, weights: ModelParameters) -> bool:
    try:
        sharding.check(weights)
    except FuseError:
        return False
    return True


def random_sharding(draw: random.Random, weights: ModelParameters, ranks: int) -> Sharding:
    """Some layout of at most `ranks` ranks that can divide the model."""
    powers = [2**i for i in range(7)]
    while True:
        kind = draw.choice(("megatron", "megatron", "fsdp", "vllm"))
        if kind == "megatron":
            sharding: Sharding = _megatron(draw, weights, powers)
        elif kind == "fsdp":
            sharding = FsdpSharding(draw.choice((*powers, 3, 5, 12)), draw.choice((1, 1, 2, 3, 4)))
        else:
            sharding = VllmSharding(draw.choice(powers[:4]), draw.choice((1, 2, 3, 4, 8)))
        if sharding.devices <= ranks and fits(sharding, weights):
            return sharding


def _megatron(draw: random.Random, weights: ModelParameters, powers: list[int]) -> MegatronSharding:
    model = weights.model
    tp, pp, dp = draw.choice(powers[:4]), draw.randint(1, min(4, model.layers)), draw.choice((*powers, 3))
    cp = draw.choice((1, 1, 2))
    ep = draw.choice([e for e in (1, 2, 4, 8) if dp * cp % e == 0]) if model.experts else 1
    stages: tuple[int, ...] = ()
    if draw.random() < 0.5:
        cuts = sorted(draw.sample(range(1, model.layers), pp - 1))
        stages = tuple(b - a for a, b in zip([0, *cuts], [*cuts, model.layers], strict=True))
    unit = draw.choice((1, 128)) * tp
    vocabulary = -(-model.vocabulary // unit) * unit
    return MegatronSharding(Layout(tp, pp, dp, cp, ep), stages, vocabulary, draw.random() < 0.5)


def random_pair(draw: random.Random, ranks: int) -> tuple[ModelParameters, PlacedSharding, PlacedSharding, list[int]]:
    """A model, two layouts somewhere on `ranks` ranks, and the node of each rank."""
    weights = draw.choice(SMALL)
    placed = []
    for _ in range(2):
        sharding = random_sharding(draw, weights, ranks)
        first = draw.choice((0, 0, ranks - sharding.devices, draw.randint(0, ranks - sharding.devices)))
        chosen = list(range(first, first + sharding.devices))
        if draw.random() < 0.2:
            draw.shuffle(chosen)
        placed.append(PlacedSharding(sharding, tuple(chosen)))
    per_node = draw.choice((2, 4, 8, 8, 64))
    return weights, placed[0], placed[1], [rank // per_node for rank in range(ranks)]
