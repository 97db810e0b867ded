"""`python -m ci.upstream COMMAND ...` runs the module of that name, with `main(arguments) -> exit code`."""

import importlib
import sys
import traceback

from ci.upstream.arguments import FAILED

COMMANDS = ("ab", "check", "lock", "supported")


def main(arguments: list[str]) -> int:
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: python -m ci.upstream {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        return FAILED
    command, *rest = arguments
    try:
        return importlib.import_module(f"ci.upstream.{command}").main(rest)
    except Exception:  # noqa: BLE001  Python's own exit code for it, 1, would read as yellow
        traceback.print_exc()
        return FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
