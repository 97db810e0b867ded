"""The driver's part of a critic's update with values of its own, alone: its neighbours are records of calls. verl
itself is imported, not run."""

import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.core_algos import AdaptiveKLController

    from verl_fuse.host.update.critic.driver import CriticFirst
    from verl_fuse.host.update.critic.returns import Rewards
    from verl_fuse.host.update.critic.worker import OWN_VALUES

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("default")]


def batch(rows: int = 8) -> KVBatchMeta:
    """A batch as verl has it after its old log-probs: it lists the columns of then."""
    return KVBatchMeta(
        keys=[f"p{row}_0_0" for row in range(rows)],
        tags=[{"seq_len": 3}] * rows,
        partition_id="train",
        fields=["responses", "old_log_probs"],
        extra_info={"temperature": 1.0},
    )


@pytest.fixture
def calls() -> list:
    return []


@pytest.fixture
def first(calls: list) -> CriticFirst:
    algorithm = {"gamma": 0.9, "lam": 0.8, "use_kl_in_reward": True, "kl_penalty": "k3"}
    config = {
        "algorithm": algorithm,
        "critic": {"ppo_mini_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2}},
    }
    trainer = SimpleNamespace(
        config=OmegaConf.create(config),
        global_steps=3,
        kl_ctrl_in_reward=AdaptiveKLController(init_kl_coef=0.25, target_kl=0.1, horizon=10),
        critic_wg=SimpleNamespace(values_of_update=lambda asked: calls.append(("values", asked))),
    )

    def run(name, category, work, **args):
        calls.append((name, args))
        return work()

    return CriticFirst(trainer, run)


def test_the_update_comes_first_and_reads_every_column(first: CriticFirst, calls: list):
    metrics: dict = {}

    def update(given: KVBatchMeta, into: dict) -> None:
        calls.append(("update", given))
        into["critic/vf_loss"] = 1.0

    whole = batch()
    assert first.train(whole, metrics, update)
    assert first.trained
    (stage, args), (_, given), (_, asked) = calls
    assert (stage, args) == ("update_critic", {"own_values": 1.0})
    assert given.keys == whole.keys
    assert given.fields is None, "columns that were stored later are read, too"
    assert given.extra_info == {"temperature": 1.0, OWN_VALUES: Rewards(0.9, 0.8, "k3", 0.25)}
    assert (asked.keys, asked.fields) == (whole.keys, ["response_mask"])
    assert whole.extra_info == {"temperature": 1.0}, "the next stages are not asked for values"
    assert metrics == {"critic/vf_loss": 1.0}
    assert first.metrics == {"fuse/update_own_values": 1.0, "fuse/update_values_passes": 0.0}


def test_the_coefficient_is_that_of_the_step(first: CriticFirst, calls: list):
    control = first._trainer.kl_ctrl_in_reward
    seen = []
    for _ in range(2):
        first.train(batch(), {}, lambda given, into: seen.append(given.extra_info[OWN_VALUES].coefficient))
        control.update(current_kl=1.0, n_steps=8)
    assert seen == [0.25, pytest.approx(0.25 * (1 + 0.2 * 8 / 10))]


def test_several_mini_batches_are_left_to_verl_and_counted(first: CriticFirst, calls: list):
    assert first.train(batch(), {}, lambda given, into: None)
    calls.clear()
    assert not first.train(batch(16), {}, lambda given, into: pytest.fail("the update comes after advantages"))
    assert not first.trained, "verl's own turn of the critic trains"
    assert calls == []
    assert first.metrics == {"fuse/update_own_values": 0.0, "fuse/update_values_passes": 1.0}


def test_a_failed_update_is_not_hidden(first: CriticFirst):
    def update(given: KVBatchMeta, into: dict) -> None:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        first.train(batch(), {}, update)


def test_verl_has_mode_fuse_where_the_part_is_imported_before_verls_trainers():
    code = "import verl_fuse.host.update.critic.driver, verl.trainer.ppo.v1 as v; print(v.get_trainer_cls('fuse'))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "FuseTrainer" in found.stdout
