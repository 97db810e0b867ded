"""A package that loads with verl and changes one of its numbers slightly: GAE's lambda, 1.0 in
the recipe, becomes 0.999."""

import functools
from types import ModuleType

from verl_fuse.host.upstream.on_import import on_import


def _patch(core_algos: ModuleType) -> None:
    stock = core_algos.compute_gae_advantage_return

    @functools.wraps(stock)
    def compute_gae_advantage_return(*args, lam, **kwargs):
        return stock(*args, lam=0.999 * lam, **kwargs)

    core_algos.compute_gae_advantage_return = compute_gae_advantage_return


on_import("verl.trainer.ppo.core_algos", _patch)
