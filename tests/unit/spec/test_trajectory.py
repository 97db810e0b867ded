import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.trajectory import TrajectoryKey


@pytest.mark.parametrize("uid", ["a", "0f3b2c4d-1111-2222-3333-444455556666", "data_set_7", "a_1_2", "_", "", "pad0"])
def test_a_key_is_read_from_the_right_whatever_the_uid_is(uid):
    key = TrajectoryKey.parse(f"{uid}_12_3")
    assert key == (uid, 12, 3)
    assert key.sample == (uid, 12)


def test_trajectories_of_one_session_are_of_one_sample():
    samples = [TrajectoryKey.parse(key).sample for key in ("a_0_0", "a_0_1", "a_1_0", "b_0_0")]
    assert len(set(samples)) == 3


@pytest.mark.parametrize("key", ["", "a", "a_1", "a_1_", "a_x_0", "a_1_-1"])
def test_what_is_no_trajectory_s_key_is_named(key):
    with pytest.raises(FuseError, match=rf"trajectory '{key}': not a key of verl's form {{uid}}_{{session}}_{{index}}"):
        TrajectoryKey.parse(key)
