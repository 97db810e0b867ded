"""The 33 settings of ReaL's main figure as workloads, and how its PFLOP/s are counted.

The counting was worked out from the twelve step times published beside the figure (test_real_throughput.py checks it):
four inference forwards and two trainings, a training being four forwards because activations are recomputed; a forward
is 2 operations per parameter and token plus 4 * layers * hidden * length for attention, not halved for causality; and
key and value projections are counted at full width even where a model shares KV heads. Embeddings are left out.
"""

import dataclasses
import json
from pathlib import Path

from verl_fuse.spec.cluster import Cluster, cluster_named
from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model import Model
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.workload import Workload

PUBLISHED = json.loads((Path(__file__).parent / "real_throughput.json").read_text())
PROMPT = 128
BATCH = {128: 512, 384: 256, 896: 128}
SIZES = ("llama-7b", "llama-13b", "llama-2-34b", "llama-2-70b")


@dataclasses.dataclass(frozen=True)
class Setting:
    """One group of bars; PFLOP/s of the heuristic and of ReaL."""

    kind: str
    devices: int
    generated: int
    heuristic: float
    real: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.devices} gen{self.generated}"

    @property
    def cluster(self) -> Cluster:
        return cluster_named("A100-80G", nodes=self.devices // 8)

    @property
    def main(self) -> str:
        return SIZES[(self.devices // (16 if self.kind == "both" else 8)).bit_length() - 1]

    @property
    def workload(self) -> Workload:
        actor = model_named(self.main if self.kind in ("actor", "both") else SIZES[0])
        critic = model_named(self.main if self.kind in ("critic", "both") else SIZES[0]).as_value_model()
        return Workload(
            algorithm="ppo",
            prompts=BATCH[self.generated],
            samples=1,
            prompt=LengthDistribution.parse(f"fixed:{PROMPT}"),
            response=LengthDistribution.parse(f"fixed:{self.generated}"),
            actor=actor,
            critic=critic,
            reference=actor,
            reward=critic,
            minibatches=4,
            old_log_prob=False,
        )

    @property
    def petaflop(self) -> float:
        """Operations of a step, in 1e15, as the figure counts them: six forwards each of actor's and critic's size."""
        length = PROMPT + self.generated
        tokens = BATCH[self.generated] * length
        return (
            sum(
                6 * tokens * forward_flops(model, length)
                for model in (self.workload.actor, self.workload.model("critic"))
            )
            / 1e15
        )


def forward_flops(model: Model, length: int) -> float:
    """Operations per token of a forward."""
    whole = dataclasses.replace(model, kv_heads=model.heads, value_head=False)
    return 2 * (whole.parameters - whole.embedding_parameters) + 4 * whole.layers * whole.hidden * length


def settings() -> list[Setting]:
    """Actor 8 first; 33 in all."""
    return [
        Setting(name.split()[0], int(name.split()[1]), int(generated.removeprefix("gen")), bars[2], bars[3])
        for name, group in PUBLISHED["pflops"].items()
        for generated, bars in group.items()
    ]
