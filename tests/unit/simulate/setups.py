"""Small workloads on small clusters."""

from verl_fuse.cost.analytic import AnalyticCost
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.spec.cluster import cluster_named
from verl_fuse.spec.workload import Workload

NO_POLL = SimulationOptions(stock_poll=0.0, fuse_poll=0.0)
LONG_TAIL = "bimodal:short=150,long=1600,share=0.05,sigma=0.2,max=2048"


def ppo(**changes) -> Workload:
    """PPO of a 7B actor with a long tail."""
    data = {
        "algorithm": "ppo",
        "prompts": 256,
        "prompt": "uniform:50-300",
        "response": LONG_TAIL,
        "actor": "llama-7b",
        "critic": "llama-7b",
        "reference": "llama-7b",
        "reward": "llama-7b",
        "minibatches": 4,
        **changes,
    }
    return Workload.from_dict(data)


def grpo(**changes) -> Workload:
    """GRPO with four samples a prompt."""
    return ppo(
        **{"algorithm": "grpo", "prompts": 64, "samples": 4, "critic": None, "reward": None, "actor": "qwen2.5-7b",
           "reference": "qwen2.5-7b", **changes}
    )  # fmt: skip


def h100(nodes: int = 2) -> AnalyticCost:
    return AnalyticCost(cluster_named("h100", nodes=nodes))
