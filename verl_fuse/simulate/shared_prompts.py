"""Counts what is computed where the samples of a prompt share it (`fuse.update.share_prompts`).

Invariants (tests/unit/simulate/test_simulated_sharing.py):
- where nothing is shared a batch is what its sequences are;
- a response still attends to its whole prompt.
"""

from collections.abc import Iterator

import numpy as np

from verl_fuse.cost.model import Batch, Numbers
from verl_fuse.simulate.draw import DrawnLengths
from verl_fuse.spec.arrays import Floats, Ints
from verl_fuse.spec.plan import Plan
from verl_fuse.spec.workload import Call, Workload

FEATURE = "share_prompts"


def copies_left(samples: Numbers, mini_batches: int) -> Numbers:
    """Return the share of the copies of a prompt that is computed, of a number or an array of `samples`. Each
    mini-batch computes the prompt once; verl's balance of lengths over ranks deals samples out to mini-batches as if at
    random."""
    return mini_batches * (1 - (1 - 1 / mini_batches) ** samples) / samples


def shared_batch(lengths: DrawnLengths, mini_batches: int) -> Batch:
    """Return the computation of a call over these samples; micro-batches are packed."""
    saved = _saved(lengths.group, mini_batches)
    whole = Batch.of(lengths.prompt + lengths.response)
    prompt = lengths.prompt.astype(np.float64)
    return Batch(whole.sequences, whole.tokens - float(saved @ prompt), whole.squares - float(saved @ prompt**2))


def shares(call: Call, plan: Plan, features: frozenset[str]) -> bool:
    """Tell whether a call computes prompts once: with FSDP, and not on a critic's own devices. Calls while others
    generate share what they happen to have of a prompt, which is not counted."""
    streamed = call.kind == "infer" and features & {"interstage", "streaming"}
    models = ("actor", "reference") if "placement" in features else ("actor", "reference", "critic")
    return FEATURE in features and call.role in models and not streamed and plan.call(call.name).layout.shards > 0


def notes_of(workload: Workload, plan: Plan, features: frozenset[str]) -> Iterator[str]:
    """Yield the notes on a step."""
    if FEATURE not in features:
        return
    sharing = [call for call in workload.calls[1:] if shares(call, plan, features)]
    if workload.samples == 1:
        yield "each prompt has one sample"
    elif not sharing:
        yield "prompts are shared by FSDP's engines alone (--set engine=fsdp)"
    else:
        left = copies_left(workload.samples, workload.minibatches)
        yield f"{left:.0%} of the copies of a prompt are computed in the update, {1 / workload.samples:.0%} in a pass"


def saved_share(group: Ints, prompt: Ints, response: Ints, mini_batches: int) -> float:
    """Return the share of all tokens of recorded samples that need not be computed; `group` has a number for each
    prompt."""
    return float(_saved(group, mini_batches) @ prompt) / float((prompt + response).sum())


def _saved(group: Ints, mini_batches: int) -> Floats:
    """Return for each sample the share of its prompt that need not be computed."""
    return 1 - copies_left(np.bincount(group), mini_batches)[group]
