"""Makes the parts of the step that leave work out of updates, for `verl_fuse.hookspecs.Trainer.add_part`: each function
gets the trainer of mode `fuse`, and the worker groups of the trained models.

What needs verl is imported when a part is made.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from verl_fuse_update.lean.options import LeanOptions
from verl_fuse_update.refusals import Model


def own_values(host: Any, groups: Mapping[str, Any]) -> Any:
    """Return the part that updates the critic where verl computes values: the first mini-batch's own forward pass
    computes its values."""
    from verl_fuse_update.critic.driver import CriticFirst

    return CriticFirst(host, host.run_stage)


def lean(host: Any, groups: Mapping[str, Any], *, options: LeanOptions, balance: bool, share: bool) -> Any:
    """Return the part that updates the actor by `options`. `balance`: rows change ranks in steps that leave no sample
    out, too. `share`: they are placed for workers that compute each prompt once."""
    from verl_fuse_update.lean.driver import LeanUpdates

    return LeanUpdates(host, host.run_stage, options, balance, share)


def balanced(host: Any, groups: Mapping[str, Any], *, models: Sequence[Model]) -> Any:
    """Return the part that balances the updates of these models over ranks within each mini-batch."""
    from verl_fuse_update.balance import BalancedUpdates

    return BalancedUpdates(host, models)


def shared(
    host: Any, groups: Mapping[str, Any], *, models: Sequence[Model], places: Sequence[Model], balance: bool
) -> Any:
    """Return the part that places samples of a prompt on one rank in the passes of these models and in the updates of
    `places`, whose samples no other part places. `balance`: an update says what its order saves."""
    from verl_fuse_update.shared import PlacedPrompts

    return PlacedPrompts(host, models, places, balance)


def streamed(host: Any, groups: Mapping[str, Any], *, options: LeanOptions, deferred: bool) -> Any:
    """Return the part that trains groups named by `fuse_train_next` on the devices of released replicas while other
    replicas generate. `deferred`: the loss is a mean over the batch's tokens."""
    from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

    from verl_fuse.host.inference.lane import Lane
    from verl_fuse_update.stream.driver import StreamedUpdates
    from verl_fuse_update.stream.lanes import StreamLanes

    each, timeout, recorder = host.replicas.devices_each, host.settings.core.call_timeout, host.journal.recorder

    def lane_of(number: int) -> Lane:
        # A slice there may compute inference: then both share its lane.
        return host.inference.lane_at(number) or Lane(f"update {number}", recorder, timeout)

    lanes = StreamLanes(groups["actor"].world_size // each, lane_of)
    stock = partial(PPOTrainerSync._compute_advantage, host)
    host.director.training = StreamedUpdates(host, host.run_stage, options, lanes, each, stock, deferred)
    return host.director.training
