"""With logits of responses alone an actor is stock verl's: log-probs, entropies, losses, gradient norms, parameters and
Adam's moments, with real workers of two ranks.

What is compared with: two of verl's own splits of the same batch into micro-batches. Shows the invariants in the
docstring of verl_fuse/host/inference/response_logits.py.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import KL, Arm, compared, passes, write_model
from small_engines import Ranks, cpu_server

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

# Two steps.
ZEROS = ("some", "none")
ENTROPY = {"entropy_coeff": 0.01, "calculate_entropy": True}
PADDED, PACKED, BY_TOKENS, PADDED_BY_TOKENS = Arm(), Arm(packed=True), Arm(packed=True, tokens=40), Arm(tokens=40)
WARM = Arm(packed=True, temperature=0.7, actor=ENTROPY, mini_batches=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_model(folder)
        yield folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


def test_show(ranks, folder):
    import time
    for engine in ("fsdp2", "fsdp2 kept", "fsdp2 lora", "fsdp2 offloaded", "fsdp2 shared"):
        for name, arm in {"padded": PADDED, "packed": PACKED, "tokens": BY_TOKENS, "padded tokens": PADDED_BY_TOKENS, "warm": WARM, "kl": replace(WARM, actor=ENTROPY|KL, temperature=None)}.items():
            if "shared" in engine and not arm.packed: continue
            start = time.time()
            arms = {"stock": arm, "ours": replace(arm, responses=True), "split": replace(arm, micro_batch=4, tokens=arm.tokens and 70), "off": replace(arm, responses=True, fault="off by one")}
            found = ranks.call(compared, folder, engine, arms, ZEROS, [("stock", "ours"), ("stock", "split"), ("stock", "off")])
            print(engine, name, f"{time.time()-start:.1f}")
            for k, v in found[0].items():
                if k != "metrics": print("   ", k, v)
            for rank in ranks.call(passes, folder, engine, arms):
                s, o = rank["stock"], rank["ours"]
                print({k: (float((s[k] - o[k]).abs().max()) if hasattr(s[k], "abs") else (s[k], o[k])) for k in s}, o.get("other log_probs", [1])[:3])
