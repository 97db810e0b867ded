"""The invariants in the docstring of verl_fuse/runtime/program.py."""

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.runtime.program import Instruction, PipelineProgram
from verl_fuse.spec.problem import Pipeline, ScheduleProblem

PROBLEM = ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2, 1),))
TEXT = "0F0 0F0>1 0B0<1 0B0\n0F0<0 0F0 0B0 0B0>0\n"


def test_the_text_form_parses_back():
    program = PipelineProgram.from_text(PROBLEM, TEXT)
    assert program.to_text() == TEXT
    assert program.rows[0][1:3] == (Instruction("send", 0, "F", 0, 1), Instruction("receive", 0, "B", 0, 1))
    assert PipelineProgram.from_text(PROBLEM, program.to_text()) == program


@pytest.mark.parametrize("token", ["0F", "F0", "0G1", "0F1<", "0F1-2", "-1F0"])
def test_a_token_that_is_none_is_named(token: str):
    with pytest.raises(FuseError, match=f"program text, rank 1: '{token}'"):
        PipelineProgram.from_text(PROBLEM, f"0F0\n0F0 {token}\n")


def test_digests_tell_rows_and_problems_apart():
    digests = PipelineProgram.from_text(PROBLEM, TEXT).digests
    other_row = PipelineProgram.from_text(PROBLEM, TEXT.replace("0F0>1 0B0<1", "0B0<1 0F0>1")).digests
    assert other_row[0] != digests[0]
    assert other_row[1] == digests[1]
    other_problem = ScheduleProblem(2, (Pipeline("actor", (0, 1), 1, 1, 2.5, 1),))
    assert not set(PipelineProgram.from_text(other_problem, TEXT).digests) & set(digests)


def test_the_grid_marks_instructions_and_ends():
    assert PipelineProgram.from_text(PROBLEM, TEXT).grid({0: 2, 1: 4}) == (
        "  rank 0: 0F0 0F0>1 [0B0<1] 0B0\n  rank 1: 0F0<0 0F0 0B0 0B0>0 [end]"
    )
