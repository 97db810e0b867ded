"""The compiled form of a two-rank problem, spelled out."""

from problems import two_ranks

from verl_fuse.schedule.table import OpTable


def test_ids_count_through_pipeline_stage_kind_microbatch():
    table = OpTable(two_ranks(2))
    assert [table.id(0, 0, 0, 1), table.id(0, 1, 1, 0), table.id(1, 0, 0, 0)] == [1, 6, 8]
    assert len(table) == 16
    assert table.rank.tolist() == [0] * 4 + [1] * 8 + [0] * 4


def test_inputs_and_transfers():
    table = OpTable(two_ranks(1, transfer=0.5))
    #                              0F@0 0B@0 0F@1 0B@1 1F@1 1B@1 1F@0 1B@0
    assert table.before.tolist() == [-1, 3, 0, 2, -1, 7, 4, 6]
    assert table.delay.tolist() == [0, 0.5, 0.5, 0, 0, 0.5, 0.5, 0]
