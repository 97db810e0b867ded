"""The pages are made of the data of other tests."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("timeline", "compare", "schedule"))
