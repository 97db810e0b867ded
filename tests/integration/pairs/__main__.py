"""Run the rows of the table that have no result in a folder, and write the table with all figures to README.md.

    PYTHONPATH=tests/integration python tests/integration/pairs RESULTS [--seconds N] [--only WORDS]

With --seconds no row is begun after that time (exit code 75: rows are left). --only: rows whose
description has these words.
"""

import argparse
import sys
import time
from pathlib import Path

from judging import faults, figures, needs_stock
from report import BEGIN, END, kept_rows, markdown, rows
from rows import kept, name_of, stock_gap
from support.fork_server import fork_server
from table import described, stock_row

README = Path(__file__).parent / "README.md"
LEFT = 75


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    args = parser.parse_args()
    folder = args.results.absolute()
    wanted = [row for row in rows() if args.only in described(row)]
    begun = time.monotonic()
    missing = [row for row in wanted if not (folder / f"{name_of(row)}.json").exists()]
    if missing:
        with fork_server() as variables:
            for row in missing:
                if time.monotonic() - begun > args.seconds:
                    break
                done = kept(folder, folder / "home", row, variables)
                if needs_stock(row):
                    kept(folder, folder / "home", stock_row(row), variables, stock=True)
                print(
                    time.strftime("%H:%M:%S"),
                    described(row),
                    done["code"],
                    done["seconds"],
                    faults(done, None),
                    flush=True,
                )
    write(folder)
    return LEFT if any(not (folder / f"{name_of(row)}.json").exists() for row in wanted) else 0


def write(folder: Path) -> None:
    """The table, with what results there are in the folder or else in README.md, into README.md."""
    found = {}
    for row in rows():
        if (folder / f"{name_of(row)}.json").exists():
            done = kept(folder, folder / "home", row, {})
            bound = None
            if needs_stock(row):
                bound = stock_gap(kept(folder, folder / "home", stock_row(row), {}, stock=True))
            found[described(row)] = (figures(done), faults(done, bound), done["seconds"])
    before, _, rest = README.read_text().partition(BEGIN)
    table, _, after = rest.partition(END)
    README.write_text(f"{before}{BEGIN}\n\n{kept_rows(markdown(found), table)}\n{END}{after}")


if __name__ == "__main__":
    sys.exit(main())
