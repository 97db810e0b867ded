"""Small workloads for tests of the planner."""

from verl_fuse.spec.lengths import LengthDistribution
from verl_fuse.spec.model_names import model_named
from verl_fuse.spec.workload import Workload

PROMPT, RESPONSE = (
    LengthDistribution.parse("fixed:512"),
    LengthDistribution.parse("lognormal:median=400,sigma=1.0,max=1024"),
)


def ppo(model: str = "qwen2.5-7b", reward: str | None = None) -> Workload:
    actor = model_named(model)
    critic = actor.as_value_model()
    scorer = model_named(reward).as_value_model() if reward else None
    return Workload("ppo", 256, 1, PROMPT, RESPONSE, actor, critic, actor, scorer, minibatches=4)


def grpo(model: str = "qwen2.5-7b") -> Workload:
    actor = model_named(model)
    return Workload("grpo", 64, 4, PROMPT, RESPONSE, actor, None, actor, minibatches=2)
