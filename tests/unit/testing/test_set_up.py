"""The trainer of `verl_fuse.testing`: it has what `fuse_setup` can ask of a trainer, and nothing else."""

import inspect

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.hookspecs import Trainer
from verl_fuse.testing import SetUpTrainer, replicas

MEMBERS = [name for name in vars(Trainer) if not name.startswith("_")]


@pytest.mark.parametrize("name", MEMBERS)
def test_every_member_can_be_used(name: str):
    trainer, member = SetUpTrainer(block="the block", memory={}), getattr(Trainer, name)
    if isinstance(member, property):
        getattr(trainer, name)
        return
    needed = [
        p.name for p in inspect.signature(member).parameters.values() if p.default is p.empty and p.name != "self"
    ]
    assert getattr(trainer, name)(**dict.fromkeys(needed, "x")) is not NotImplemented
    assert trainer.used == ([(name, dict.fromkeys(needed, "x"))] if name.startswith(("use_", "add_")) else [])


def test_values_are_those_given():
    views = replicas([0, 0])
    trainer = SetUpTrainer(config={"data.train_batch_size": 8}, blocks={"acme": 3}, replicas=views, devices_each=2)
    assert (trainer.config.data.train_batch_size, trainer.block("acme")) == (8, 3)
    assert (trainer.replica_views(), trainer.devices_each) == (views, 2)
    trainer.use_routing(None)
    trainer.add_part(make=repr)
    assert trainer.used == [
        ("use_routing", {"warm_prefix_tokens": None}),
        ("add_part", {"make": repr}),
    ]


def test_a_block_that_was_not_given_is_named():
    with pytest.raises(FuseError, match=r"no block 'other'; given: acme; add blocks=\{'other': \.\.\.\}"):
        SetUpTrainer(blocks={"acme": 3}).block("other")
    with pytest.raises(FuseError, match=r"training_memory was asked for, and the trainer has none; give memory="):
        SetUpTrainer().training_memory()


@pytest.mark.parametrize(("call", "error"), [("use_everything", AttributeError), ("use_routing", TypeError)])
def test_what_no_trainer_takes_is_an_error(call: str, error: type[Exception]):
    with pytest.raises(error):
        getattr(SetUpTrainer(), call)()
