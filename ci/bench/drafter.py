"""Measure the time that the drafter of `fuse.speculation` takes between two passes of the engine, on the host.

Milliseconds of a pass, the median of many: `idle` where no row has tokens that were seen before, so that there is
nothing to draft, `drafting` where each row drafts all the tokens it may. The rows are arrays as vLLM keeps them; no
engine runs.

    python -m ci.bench.drafter [--rows 1 8 64 256] [--passes 200] [--tokens 8]
"""

import argparse
import json
import statistics
import tempfile
import time
from types import SimpleNamespace

import numpy as np

from verl_fuse_speculation.engine import BLOCK
from verl_fuse_speculation.proposer import HistoryProposer

LONGEST, PROMPT, VOCABULARY = 2048, 64, 151936
HISTORY_BYTES = 256 << 20


def drafter(folder: str, tokens: int) -> HistoryProposer:
    """Return a drafter with the fields of vLLM's configuration that it reads."""
    config = SimpleNamespace(
        additional_config={BLOCK: {"auto": False, "history_bytes": HISTORY_BYTES, "epochs": 3}},
        compilation_config=SimpleNamespace(cudagraph_mode="NONE", max_cudagraph_capture_size=0),
        model_config=SimpleNamespace(
            max_model_len=LONGEST, hf_config=SimpleNamespace(eos_token_id=2), get_vocab_size=lambda: VOCABULARY
        ),
        parallel_config=SimpleNamespace(rank=0),
        speculative_config=SimpleNamespace(
            num_speculative_tokens=tokens, draft_load_config=SimpleNamespace(download_dir=folder)
        ),
    )
    return HistoryProposer(config)


def measure(count: int, passes: int, tokens: int, *, seen: bool) -> tuple[float, float]:
    """Return the median milliseconds of a pass of `count` rows, and the tokens drafted per row and pass; `seen`: the
    same samples were generated before."""
    numbers = np.random.default_rng(count)
    rows = np.zeros((max(256, count), LONGEST), np.int32)
    samples = numbers.integers(10, VOCABULARY, (count, PROMPT + passes + 1), dtype=np.int32)
    seconds, drafted = [], 0
    with tempfile.TemporaryDirectory() as folder:
        own = drafter(folder, tokens)
        for visit in range(1 + seen):
            seconds, drafted = [], 0
            rows[:count, :PROMPT] = samples[:, :PROMPT]
            for length in range(PROMPT, PROMPT + passes + 1):
                rows[:count, length] = samples[:, length]
                sampled = [[token] for token in samples[:, length].tolist()]
                begun = time.perf_counter()
                drafts = own.propose(sampled, np.full(len(rows), length + 1), rows)
                seconds.append(time.perf_counter() - begun)
                drafted += sum(map(len, drafts))
            if visit == 0:
                # All samples end, and their rows are free.
                own.propose([[] for _ in range(count)], np.zeros(len(rows), np.int64), rows)
        own.write()
    return statistics.median(seconds[1:]) * 1e3, drafted / count / len(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--passes", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=8, help="drafted for a row at most")
    options = parser.parse_args()
    found: dict[str, dict[int, float]] = {"idle_ms": {}, "drafting_ms": {}}
    print(f"{'rows':>6} {'idle ms':>9} {'drafting ms':>12} {'drafted a row':>14}")
    for count in options.rows:
        idle, none = measure(count, options.passes, options.tokens, seen=False)
        drafting, each = measure(count, options.passes, options.tokens, seen=True)
        if none > 0:
            raise SystemExit(f"{count} rows: {none} tokens a row drafted where nothing was seen before")
        found["idle_ms"][count], found["drafting_ms"][count] = round(idle, 4), round(drafting, 4)
        print(f"{count:6} {idle:9.4f} {drafting:12.4f} {each:14.2f}")
    print(json.dumps({"bench": "drafter", **found}))


if __name__ == "__main__":
    main()
