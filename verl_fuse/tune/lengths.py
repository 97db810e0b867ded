"""Compares live trials at equal lengths: each draws responses of its own, whose lengths make most of its noise.

How seconds grow with the mean and with the longest response of a step is fitted to all live trials of the search
together, as powers. Each trial has a level of its own, and each step too, whose prompts are those of all trials
(analysis of covariance). Settings that train the same draw lengths of the same distribution, so that no trial is
favoured.

Invariants (tests/unit/tune/test_equal_lengths.py):
- of trials that differ by their lengths alone the seconds become equal; levels that differ stay as they are;
- the noise that is left is as wide as the fit leaves levels unsure: what it took is given back, and what the powers may
be off by at a trial's own lengths is added;
- longer responses never save time, nor do they cost more than in proportion; where too few steps were made to fit,
seconds stay as they are.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from verl_fuse.spec.arrays import nonnegative_fit
from verl_fuse.tune.trial import Trial

# Steps beyond those that levels and powers take.
LEAST = 2


def at_equal_lengths(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials; of live ones that know their lengths with the seconds that steps of common lengths take."""
    live = [
        number
        for number, trial in enumerate(trials)
        if trial.measured and not trial.replayed and len(trial.outcome.lengths) == len(trial.outcome.seconds)
    ]
    if not live:
        return [*trials]
    counts = [len(trials[number].outcome.seconds) for number in live]
    seconds = np.log(np.concatenate([trials[number].outcome.seconds for number in live]))
    lengths = np.log(np.concatenate([trials[number].outcome.lengths for number in live]))
    lengths -= lengths.mean(axis=0)
    of_trial = np.repeat(np.arange(len(live)), counts)
    of_step = np.concatenate([np.arange(count) for count in counts])
    levels = np.hstack([of_trial[:, None] == np.arange(len(live)), of_step[:, None] == np.arange(1, max(counts))])
    levels = levels.astype(float)
    free = len(seconds) - levels.shape[1] - lengths.shape[1]
    if free < LEAST:
        return [*trials]
    beside = lengths - levels @ np.linalg.lstsq(levels, lengths, rcond=None)[0]
    powers = nonnegative_fit(beside, seconds - levels @ np.linalg.lstsq(levels, seconds, rcond=None)[0])
    powers /= max(1.0, powers.sum())
    equal = seconds - lengths @ powers
    fitted = np.linalg.lstsq(levels, equal, rcond=None)[0]
    noise = equal - levels @ fitted
    used = powers > 0
    unsure = np.linalg.pinv(beside[:, used].T @ beside[:, used])
    found = [*trials]
    for place, (number, count) in enumerate(zip(live, counts, strict=True)):
        own = of_trial == place
        off = lengths[own].mean(axis=0)[used]
        wider = np.sqrt((len(seconds) - len(live)) / free * (1 + count * off @ unsure @ off))
        # The mean of a trial's noise is 0.
        level = fitted[place] + fitted[len(live) :].sum() / max(counts) + wider * noise[own]
        trial = trials[number]
        found[number] = replace(trial, outcome=replace(trial.outcome, seconds=tuple(np.exp(level).tolist())))
    return found
