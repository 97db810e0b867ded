"""Megatron layouts of verl_fuse.reshard are those of real Megatron models, rank by rank, and hold what
mbridge loads into them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

# Model, layout, whether contents are compared with mbridge's (which numbers blocks from 0 on every stage).
CASES = (
    ("small-qwen2", "megatron tp2 dp2 local", True),
    ("small-qwen2", "megatron tp4 vocabulary=512 local", True),
    ("small-qwen2", "megatron pp5 vocabulary=128 local", False),
    ("small-qwen3", "megatron tp2 pp4 local", False),
    ("small-moe", "megatron dp4 ep2 local", False),
)


def test_every_rank_has_megatrons_tensors_and_mbridges_contents():
    """tp4 has fewer key heads than ranks; pp5 ties the head to the embedding over stages."""
    script = Path(__file__).parent / "support" / "megatron_shards.py"
    process = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        input="\n".join(map(json.dumps, CASES)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    lines = [line for line in process.stdout.splitlines() if line.startswith("[")]
    assert {" ".join(case[:2]): json.loads(line) for case, line in zip(CASES, lines, strict=True)} == {
        " ".join(case[:2]): [] for case in CASES
    }
