"""Choose the finished samples that a lane runs next. Pure: values in, keys out.

Invariants (tests/unit/interstage/test_interstage_policy.py):
- a micro-group's size is a multiple of the lane's `multiple` and at least `micro_group`, except that released devices
  with nothing to do take any sample that is ready;
- only samples that are ready are handed out, each once: oldest first to devices that still generate, longest first to
  released devices;
- of the tokens that are ready, released devices take half at once, in equal shares: large calls cost less per sample,
  small calls come last, when generation may end any time (factoring, Hummel, Schonberg and Flynn 1992);
- where prompts are computed once (`by_prompt`), samples of a prompt go together, by the oldest or longest of them;
- nothing is handed out to a lane with a full queue, to one that is busy while other released devices have nothing to do
  or, unless its devices are released, before the start condition holds; the host takes the samples that are left when
  generation ends.
"""

from collections.abc import Sequence
from itertools import accumulate

from verl_fuse.spec.step import LaneView, RolloutView, Sample
from verl_fuse_interstage.config import InterstageConfig


def next_micro_group(
    config: InterstageConfig, view: RolloutView, lane: LaneView, by_prompt: bool = False
) -> Sequence[str] | None:
    """Return the keys of the next micro-group for this lane, or None."""
    size = -(-config.micro_group // lane.multiple) * lane.multiple
    if lane.queued >= config.max_queued:
        return None
    if lane.released:
        return _longest(view, lane, size, by_prompt)
    waiting = view.expected and view.unfinished / view.expected > config.start_unfinished_fraction
    if waiting or len(view.ready) < size:
        return None
    return [sample.key for sample in _together(view.ready, by_prompt)[:size]]


def _together(samples: Sequence[Sample], by_prompt: bool) -> Sequence[Sample]:
    """Return samples of a prompt one after the other, prompts in the order of their first samples."""
    if not by_prompt:
        return samples
    first: dict[str, int] = {}
    for place, sample in enumerate(samples):
        first.setdefault(sample.group, place)
    return sorted(samples, key=lambda sample: first[sample.group])


def _longest(view: RolloutView, lane: LaneView, least: int, by_prompt: bool) -> Sequence[str] | None:
    others = [each for each in view.lanes if each.released and each.name != lane.name]
    if lane.queued and any(not each.queued for each in others):
        return None
    # The sort is stable: of equally long samples the oldest goes first.
    longest = _together(sorted(view.ready, key=lambda sample: -sample.seq_len), by_prompt)
    share = sum(sample.seq_len for sample in longest) / 2 / (1 + len(others))
    lengths = accumulate(sample.seq_len for sample in longest)
    samples = sum(1 for length in lengths if length <= share)
    size, fitting = (count // lane.multiple * lane.multiple for count in (samples, len(longest)))
    size = max(least, size)
    if not lane.queued:
        size = min(size, fitting)
    if not 0 < size <= fitting:
        return None
    return [sample.key for sample in longest[:size]]
