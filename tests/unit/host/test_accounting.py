import json

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.host.record.accounting import account, prepare_accounts, write_account

OWN = {"min_global_steps": 4, "max_global_steps": 4}


def test_counts_samples_groups_padding_and_what_is_missing():
    keys = ["a_0_0", "a_1_0", "b_0_0", "pad1_0_0"]
    tags = [OWN, OWN, OWN, {"is_padding": True}]
    result = account(5, keys, tags, expected=4, version=4)
    assert (result.samples, result.padding, result.missing) == (3, 1, 1)
    assert result.groups == {"a": 2, "b": 1}
    assert result.metrics() == {"fuse/samples_trained": 3.0, "fuse/samples_missing": 1.0, "fuse/rows_padding": 1.0}


def test_a_sample_twice_is_refused():
    with pytest.raises(FuseError, match="step 5: 1 samples appear twice in the batch, first a_0_0"):
        account(5, ["a_0_0", "a_0_0"], [OWN, OWN], expected=2, version=4)


@pytest.mark.parametrize("versions", [(3, 4), (4, 5), (3, 3), (None, None)])
def test_a_sample_of_another_weights_version_is_refused(versions):
    tag = dict(zip(("min_global_steps", "max_global_steps"), versions, strict=True))
    with pytest.raises(FuseError, match=r"step 5: sample a_0_0 was generated under weights versions .* needs 4"):
        account(5, ["a_0_0"], [tag], expected=1, version=4)


def test_replayed_rollouts_have_no_version_of_their_own():
    assert (
        account(5, ["a_0_0"], [{"min_global_steps": 5, "max_global_steps": 5}], expected=1, version=None).samples == 1
    )


def test_a_repeated_step_replaces_its_file_and_leaves_nothing_else(tmp_path):
    prepare_accounts(tmp_path)
    first = account(5, ["a_0_0"], [OWN], expected=1, version=4)
    write_account(tmp_path, first, [7])
    path = write_account(tmp_path, first, [9, 8])
    assert json.loads(path.read_text())["prompts"] == [8, 9]
    assert [entry.name for entry in (tmp_path / "accounts").iterdir()] == ["step_000005.json"]


def test_a_folder_that_cannot_be_made_is_refused_at_the_start(tmp_path):
    (tmp_path / "accounts").write_text("a file")
    with pytest.raises(FuseError, match=r"accounts cannot be made"):
        prepare_accounts(tmp_path)


def test_a_session_that_left_several_samples_counts_once_against_what_is_missing():
    keys = ["a_0_0", "a_0_1", "b_1_0", "b_1_1"]
    result = account(5, keys, [OWN] * 4, expected=4, version=4)
    assert (result.samples, result.missing) == (4, 2)
