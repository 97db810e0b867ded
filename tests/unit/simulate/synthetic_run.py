"""A recorded run directory, made from a seed."""

from pathlib import Path

import numpy as np

from verl_fuse.spec.timeline import Span, Timeline
from verl_fuse.timeline.files import record_step


def write_run(run_dir: Path, steps: int, replicas: int = 2, requests: int = 32, stage: float = 0.5) -> None:
    """Steps with skewed requests and verl's stages, those beside generation of `stage` seconds."""
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        tokens = np.clip(rng.lognormal(np.log(60), 0.9, requests).astype(int), 1, 400)
        spans = [
            Span(
                "request", f"replica {i % replicas}", "generate", 0.1, 0.2 + 0.01 * n,
                {"prompt_tokens": 10, "response_tokens": int(n), "stop_reason": "completed"},
            )
            for i, n in enumerate(tokens.tolist())
        ]  # fmt: skip
        now = 0.25 + 0.01 * int(tokens.max())
        spans.append(Span("gen", "step", "stage", 0.0, now))
        for name in ("old_log_prob", "ref", "update_actor"):
            spans.append(Span(name, "step", "stage", now, now + stage))
            now += stage
        record_step(run_dir, Timeline("synthetic", step, 0.0, now, tuple(spans)), html=False, perfetto=False)
