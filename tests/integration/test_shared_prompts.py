"""With prompts computed once an actor is stock verl's: log-probs, entropies, losses, gradient norms, parameters and
Adam's moments, with real workers of two ranks.

Shows the invariants in the docstrings of verl_fuse/host/sharing/.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))
from lean_engines import Arm, compared, passes, write_model
from small_engines import Ranks, cpu_server

pytest.importorskip("verl")
pytestmark = pytest.mark.integration

ENTROPY = {"entropy_coeff": 0.01, "calculate_entropy": True}
SAME = Arm(prompts=True)
ARMS = {
    "padded": SAME,
    "packed": replace(SAME, packed=True, micro_batch=4),
    "by tokens": replace(SAME, packed=True, tokens=60),
}
CASES = [("fsdp2", ("padded", "packed", "by tokens"))]
ROUNDING = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The model's folder; meanwhile ranks have the cpu platform."""
    folder = tmp_path_factory.mktemp("models")
    with cpu_server():
        write_model(folder)
        yield folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> Iterator[Ranks]:
    with Ranks(2, folder) as ranks:
        yield ranks


@pytest.mark.parametrize(("engine", "names"), CASES, ids=[engine for engine, _ in CASES])
def test_updates_and_passes_are_stock_verls(ranks: Ranks, folder: Path, engine: str, names: tuple[str, ...]):
    for name in names:
        stock = ARMS[name]
        ours = replace(stock, share=True)
        found = ranks.call(
            compared, folder, engine, {"stock": stock, "ours": ours}, ("some", "none"), [("stock", "ours")]
        )
        for one in found:
            print(engine, name, one["stock - ours"])
        whole = ranks.call(passes, folder, engine, {"stock": stock, "ours": ours})
        for one in whole:
            print(
                {k: v for k, v in one["ours"].items() if isinstance(v, int)},
                {k: v for k, v in one["stock"].items() if isinstance(v, int)},
            )
            print((one["ours"]["log_probs"] - one["stock"]["log_probs"]).abs().max())
