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

    from verl_fuse.host.record.step import TrainerPart
    from verl_fuse_update import short_pass
    from verl_fuse_update.balance import in_order
    from verl_fuse_update.critic import driver
    from verl_fuse_update.critic.driver import CriticFirst
    from verl_fuse_update.critic.returns import Rewards
    from verl_fuse_update.critic.worker import OWN_VALUES

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


def order_of(rows: int) -> list[int]:
    """Each two rows the other way round."""
    return [place ^ 1 for place in range(rows)]


def size_of(config, stage: str, ref_in_actor: bool) -> int:
    asked.append(stage)
    return sizes[stage]


def no_pass(given: KVBatchMeta, metrics: dict) -> None:
    pytest.fail("one mini-batch needs no pass")


# The rows of a micro-batch in a pass.
sizes, asked = {"values": 1}, list[str]()


@pytest.fixture
def calls() -> list:
    return []


@pytest.fixture
def first(calls: list, monkeypatch: pytest.MonkeyPatch) -> CriticFirst:
    algorithm = {"gamma": 0.9, "lam": 0.8, "use_kl_in_reward": True, "kl_penalty": "k3"}
    config = {
        "algorithm": algorithm,
        "critic": {"ppo_mini_batch_size": 4},
        "actor_rollout_ref": {"rollout": {"n": 2}},
    }

    class Turned(TrainerPart):
        """Places the last rows of a mini-batch first."""

        def method(self, stage, stock):
            assert stage == "update_critic"
            return lambda batch, metrics: stock(in_order(batch, order_of(len(batch))), metrics)

    monkeypatch.setattr(driver, "micro_batch", size_of)
    monkeypatch.setattr(short_pass, "_write_zeros", lambda rows, like, column: calls.append((column, rows.keys)))
    trainer = SimpleNamespace(
        parts=[Turned()],
        config=OmegaConf.create(config),
        global_steps=3,
        kl_ctrl_in_reward=AdaptiveKLController(init_kl_coef=0.25, target_kl=0.1, horizon=10),
        critic_wg=SimpleNamespace(
            values_of_update=lambda asked: calls.append(("asked", asked)), _dispatch_info={"train": [0, 1]}
        ),
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
    assert first.train(whole, metrics, no_pass, update)
    assert first.trained
    (stage, args), (_, given), (_, asked) = calls
    assert (stage, args) == ("update_critic", {"own_values": 1.0})
    turned = [whole.keys[place] for place in order_of(8)]
    assert given.keys == turned
    assert given.fields is None, "columns that were stored later are read, too"
    assert given.extra_info == {"temperature": 1.0, OWN_VALUES: Rewards(0.9, 0.8, "k3", 0.25)}
    assert (asked.keys, asked.fields) == (turned, ["response_mask"])
    assert whole.extra_info == {"temperature": 1.0}, "the next stages are not asked for values"
    assert metrics == {"critic/vf_loss": 1.0}
    assert first.metrics == {"fuse/update_own_values": 1.0, "fuse/update_values_passes": 0.0}


def test_the_coefficient_is_that_of_the_step(first: CriticFirst, calls: list):
    control = first._trainer.kl_ctrl_in_reward
    seen = []
    for _ in range(2):
        first.train(batch(), {}, no_pass, lambda given, into: seen.append(given.extra_info[OWN_VALUES].coefficient))
        control.update(current_kl=1.0, n_steps=8)
    assert seen == [0.25, pytest.approx(0.25 * (1 + 0.2 * 8 / 10))]


@pytest.mark.parametrize(
    ("size", "passed"), [(1, {4, 5, 6, 7, 12, 13, 14, 15}), (3, {4, 5, 6, 7, 12, 13, 14, 15, 0, 1, 2, 3})]
)
def test_other_mini_batches_go_through_the_pass_before_the_update(first, calls, monkeypatch, size, passed):
    monkeypatch.setitem(sizes, "values", size)
    whole = batch(16)
    assert first.train(
        whole,
        {},
        lambda given, metrics: calls.append(("pass", given)),
        lambda given, into: calls.append(("update", given)),
    )
    (_, of_pass), (column, left), (stage, args), (_, given), (_, asked) = calls
    assert {whole.keys.index(key) for key in of_pass.keys} == passed
    assert OWN_VALUES not in of_pass.extra_info
    assert (column, left) == ("values", [key for place, key in enumerate(whole.keys) if place not in passed])
    assert (stage, args) == ("update_critic", {"own_values": 1 - len(passed) / 16})
    # Of each of two ranks the first half, in the order in which it was trained.
    assert asked.keys == given.keys[:4] + given.keys[8:12]
    assert given.keys == [whole.keys[place] for place in order_of(16)]
    assert first.metrics["fuse/update_own_values"] == 1 - len(passed) / 16


def test_the_size_of_a_micro_batch_is_asked_for_once_where_there_is_a_pass(first: CriticFirst):
    asked.clear()
    assert first.train(batch(8), {}, no_pass, lambda given, into: None)
    assert asked == []
    for _ in range(2):
        assert first.train(batch(16), {}, lambda given, metrics: None, lambda given, into: None)
    assert asked == ["values"]


def test_rows_that_verl_cannot_cut_are_left_to_it_and_counted(first: CriticFirst, calls: list):
    assert first.train(batch(), {}, no_pass, lambda given, into: None)
    calls.clear()
    assert not first.train(batch(12), {}, no_pass, lambda given, into: pytest.fail("it comes after advantages"))
    assert not first.trained, "verl's own turn of the critic trains"
    assert calls == []
    assert first.metrics == {"fuse/update_own_values": 0.0, "fuse/update_values_passes": 1.0}


def test_a_failed_update_is_not_hidden(first: CriticFirst):
    def update(given: KVBatchMeta, into: dict) -> None:
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        first.train(batch(), {}, no_pass, update)


def test_verl_has_mode_fuse_where_the_part_is_imported_before_verls_trainers():
    code = "import verl_fuse_update.critic.driver, verl.trainer.ppo.v1 as v; print(v.get_trainer_cls('fuse'))"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "FuseTrainer" in found.stdout
