"""In the task with a tool each subtraction of Euclid's algorithm is a call of a calculator, in the form that verl's
`hermes` parser reads.

For the prompt `gcd 07 03` the first turn is
`<tool_call>{"name": "calculator", "arguments": {"expression": "07-03"}}</tool_call>`, the tool answers `04`, and so
on; the last turn is `=01`.
"""

import re

from verl_fuse_cpu.task.euclid import Pair, response

CALL_START = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CALL_END = '"}}</tool_call>'
# verl loads this file as `function_tool_path`; the file lies in the task's directory.
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
        # "00" is as short as an answer and never is one: the algorithm ends before a difference is zero.
        return "00"
    return f"{int(found[1]) - int(found[2]):02d}"


def call(expression: str) -> str:
    """Return the text of a turn that asks the calculator."""
    return f"{CALL_START}{expression}{CALL_END}"


def transcript(pair: Pair) -> str:
    """Return a right response with all turns and answers of the tool, as the response reads when special tokens are
    skipped."""
    return "".join(call(asked) + answered for asked, answered in pair.calls) + response((), pair.answer)
