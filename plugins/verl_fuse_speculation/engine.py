"""Make the engine arguments that let vLLM draft from history."""

from typing import Any, Literal

# The block of vLLM's `additional_config` that the drafter reads.
BLOCK = "verl_fuse_speculation"
PROPOSER = "verl_fuse_speculation.proposer.HistoryProposer"
SCHEDULER = "verl_fuse_speculation.scheduler.TokenwiseScheduler"
# By itself vLLM captures graphs of whole passes for 1 + k tokens of every request alone. With graphs for any mixture, a
# pass with drafts for some requests, or for none, takes a third to three quarters of the time (ci/gpu/README.md).
GRAPHS = "FULL"
# With tokens=auto at most so many tokens are drafted.
AUTO_TOKENS = 8


def engine_arguments(tokens: Literal["auto"] | int, history_bytes: int, epochs: int, folder: str) -> dict[str, Any]:
    """Return, by name, the arguments that vLLM lacks without drafts; each drafter shares `folder` with the others."""
    auto = tokens == "auto"
    drafter = {"auto": auto, "history_bytes": history_bytes, "epochs": epochs}
    return {
        "speculative_config": {
            "method": "custom_class",
            "model": PROPOSER,
            "num_speculative_tokens": AUTO_TOKENS if auto else tokens,
            # vLLM takes the folder for the place of a drafter's state. The folder is no part of the hash by which vLLM
            # finds code that was compiled in earlier runs.
            "draft_load_config": {"download_dir": folder},
        },
        "additional_config": {BLOCK: drafter},
        "scheduler_cls": SCHEDULER,
    }
