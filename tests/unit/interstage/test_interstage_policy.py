from dataclasses import replace

import pytest

from verl_fuse.spec.memory import RankMemory
from verl_fuse.testing import SetUpTrainer, lane, samples
from verl_fuse.testing import view as seen
from verl_fuse_interstage.config import InterstageConfig
from verl_fuse_interstage.plugin import InterstagePlugin
from verl_fuse_interstage.policy import next_micro_group


def view(finished, ready, expected=32):
    return seen(samples([8] * ready), finished=finished, expected=expected)


def test_hands_out_the_oldest_ready_samples():
    config = InterstageConfig(enabled=True, micro_group=3)
    assert next_micro_group(config, view(5, ready=5), lane()) == ["g0_0_0", "g1_0_0", "g2_0_0"]


@pytest.mark.parametrize(
    ("micro_group", "multiple", "size"), [(8, 1, 8), (8, 4, 8), (8, 6, 12), (1, 16, 16), (16, 16, 16)]
)
def test_the_size_is_a_multiple_of_what_the_workers_need_and_at_least_micro_group(micro_group, multiple, size):
    config = InterstageConfig(enabled=True, micro_group=micro_group)
    assert len(next_micro_group(config, view(32, ready=32), lane(multiple=multiple))) == size
    assert next_micro_group(config, view(size - 1, ready=size - 1), lane(multiple=multiple)) is None


def test_a_full_queue_gets_nothing():
    config = InterstageConfig(enabled=True, micro_group=1, max_queued=2)
    assert next_micro_group(config, view(4, ready=4), lane(queued=1)) is not None
    assert next_micro_group(config, view(4, ready=4), lane(queued=2)) is None


def test_waits_for_the_start_condition():
    config = InterstageConfig(enabled=True, micro_group=1, start_unfinished_fraction=0.25)
    assert next_micro_group(config, view(23, ready=23), lane()) is None
    assert next_micro_group(config, view(24, ready=24), lane()) is not None


RELEASED = replace(lane(), released=True)


def rollout(*lengths):
    return seen(samples(lengths), finished=max(4, len(lengths)), expected=max(32, len(lengths)))


def test_released_devices_get_the_longest_samples_at_once():
    config = InterstageConfig(enabled=True, micro_group=2, start_unfinished_fraction=0.0, max_queued=1)
    ready = rollout(8, 30, 8, 12)
    assert next_micro_group(config, ready, lane()) is None
    assert next_micro_group(config, ready, RELEASED) == ["g1_0_0", "g3_0_0"]
    assert next_micro_group(config, ready, replace(RELEASED, queued=1)) is None


def test_samples_of_a_prompt_go_together_where_it_is_computed_once():
    """Ready are samples of the prompts a, b, a, c, b, a, of these lengths."""
    made = samples([8, 30, 12, 9, 10, 20])
    ready = seen([replace(one, group=name) for one, name in zip(made, "abacba", strict=True)], finished=32, expected=32)
    config = InterstageConfig(enabled=True, micro_group=3)
    of_group = {one.key: (one.group, one.seq_len) for one in ready.ready}

    def taken(lane, by_prompt):
        return [of_group[key] for key in next_micro_group(config, ready, lane, by_prompt)]

    lengths = [one.seq_len for one in ready.ready]
    a, b = (lengths[0], lengths[2], lengths[5]), (lengths[1], lengths[4])
    assert taken(lane(), False) == [("a", a[0]), ("b", b[0]), ("a", a[1])]
    assert taken(lane(), True) == [("a", each) for each in a]
    assert taken(RELEASED, False) == [("b", b[0]), ("a", a[2]), ("a", a[1])]
    assert taken(RELEASED, True) == [("b", b[0]), ("b", b[1]), ("a", a[2])]


@pytest.mark.parametrize(("switch", "can", "together"), [(True, True, True), (True, False, False), (None, True, False)])
def test_the_plugin_asks_whether_workers_compute_a_prompt_once(switch, can, together):
    made = [replace(one, group=name) for one, name in zip(samples([8] * 4), "abab", strict=True)]
    memory = {"actor": [RankMemory("node", 1, None, (), 1, 0, 0, 0)]}
    trainer = SetUpTrainer(
        config={"fuse.update.share_prompts": switch, "actor_rollout_ref.actor.strategy": "fsdp2"},
        block=InterstageConfig(enabled=True, micro_group=2),
        memory=memory,
        shares_prompts=("actor",) if can else (),
    )
    plugin = InterstagePlugin()
    plugin.fuse_setup(trainer=trainer)
    keys = plugin.fuse_infer_next(view=seen(made, finished=32, expected=32), lane=lane())
    assert [one.group for one in made if one.key in keys] == (["a", "a"] if together else ["a", "b"])


def test_idle_released_devices_take_whatever_is_ready():
    config = InterstageConfig(enabled=True, micro_group=8)
    assert next_micro_group(config, rollout(8, 30), RELEASED) == ["g1_0_0", "g0_0_0"]
    assert next_micro_group(config, rollout(8, 30, 9), replace(RELEASED, multiple=2)) == ["g1_0_0", "g2_0_0"]
    assert next_micro_group(config, rollout(8), replace(RELEASED, multiple=2)) is None
    assert next_micro_group(config, rollout(), RELEASED) is None
    assert next_micro_group(config, rollout(8, 30), replace(RELEASED, queued=1)) is None, (
        "busy: it waits for a full one"
    )


def test_lanes_share_the_tokens_that_are_ready():
    """Eight lanes are asked in turn, as the host does, until none takes any more."""
    config, busy = InterstageConfig(enabled=True, micro_group=8), dict.fromkeys(range(8), 0)
    lengths = [9 + 3 * number for number in range(3000)]
    ready, first = rollout(*lengths), []

    def lanes():
        return tuple(replace(RELEASED, name=f"slice {number}", queued=queued) for number, queued in busy.items())

    for _ in range(3):
        for number in busy:
            while keys := next_micro_group(config, replace(ready, lanes=lanes()), lanes()[number]):
                if busy[number]:
                    assert len(first) == 8, "no second call while another lane has none"
                else:
                    first.append(sum(sample.seq_len for sample in ready.ready if sample.key in set(keys)))
                busy[number] += 1
                ready = replace(ready, ready=tuple(sample for sample in ready.ready if sample.key not in set(keys)))
    assert max(first) < 1.7 * min(first)
    assert 0.3 < sum(first) / sum(4 + length for length in lengths) < 0.5
    assert set(busy.values()) == {2}, "the queue has room for two"


@pytest.mark.parametrize(("ready", "multiple", "size"), [(40, 1, 20), (12, 1, 8), (41, 4, 20), (20, 16, 16)])
def test_released_devices_take_half_of_what_is_ready_at_once(ready, multiple, size):
    config = InterstageConfig(enabled=True, micro_group=8)
    for queued in (0, 1):
        released = replace(RELEASED, multiple=multiple, queued=queued)
        assert len(next_micro_group(config, rollout(*[9] * ready), released)) == size
