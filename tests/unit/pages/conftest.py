"""The pages are made of what other tests make."""

import sys
from pathlib import Path

sys.path.extend(str(Path(__file__).parents[1] / folder) for folder in ("timeline", "compare", "schedule"))
