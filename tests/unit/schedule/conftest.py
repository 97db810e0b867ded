"""Lets the tests of this folder import its helpers: checker, problems, brute_force."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
