"""The task with a tool: each subtraction of Euclid's algorithm is a call of a calculator, in the form that
verl's `hermes` parser reads.

Prompt `gcd 07 03`, first turn `<tool_call>{"name": "calculator", "arguments": {"expression": "07-03"}}</tool_call>`,
answer of the tool `04`, and so on; the last turn is `=01`.
"""

import re

from verl_fuse_cpu.task.euclid import Pair, response

CALL_START = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
# What verl loads as `function_tool_path`; it lies in the task's directory.
TOOL_FILE = "tools.py"
TOOL_SOURCE = """from verl.tools.function_tool import function_tool

from verl_fuse_cpu.task.calculator import calculator

function_tool(calculator)
"""


def calculator(expression: str) -> str:
    """Subtract two numbers of two digits.

    Args:
        expression: The larger number, a minus, the smaller number.
    """
    found = re.fullmatch(r"(\d\d)-(\d\d)", expression)
    if found is None or int(found[1]) < int(found[2]):
        # As short as an answer, and never one: the algorithm ends before a difference is zero.
        return "00"
    return f"{int(found[1]) - int(found[2]):02d}"


def call(expression: str) -> str:
    """The text of a turn that asks the calculator."""
    return f"{CALL_START}{expression}{CALL_END}"


def transcript(pair: Pair) -> str:
    """A right response, all turns and answers of the tool: what is left of it when special tokens are skipped."""
    return "".join(call(asked) + answered for asked, answered in pair.calls) + response((), pair.answer)
