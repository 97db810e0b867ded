"""What a policy author tests with: views built with few words, and recorded rollouts replayed through a policy.

Nothing here imports torch, ray or verl. Lengths are in tokens, times in seconds; bad input is a FuseError.
"""

from verl_fuse.plugins import hooks
from verl_fuse.testing.replay import Replayed, recorded_step, replay
from verl_fuse.testing.set_up import SetUpTrainer
from verl_fuse.testing.views import lane, prompts, replicas, samples, view

__all__ = [
    "Replayed",
    "SetUpTrainer",
    "hooks",
    "lane",
    "prompts",
    "recorded_step",
    "replay",
    "replicas",
    "samples",
    "view",
]
