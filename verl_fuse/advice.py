"""Advises on features to switch on: the features that a simulation or a replayed run predicts to gain, as overrides of
verl's configuration.

Invariants (tests/unit/test_advice.py):
- a feature that is predicted to gain less than `LEAST_GAIN_SHARE` of a step, or within its interval nothing, is not
  advised;
- of two features that verl-fuse refuses together, the one that gains more is advised; so it is of two that are
settings of one switch;
- advised features gain something beside each other, and one total is told of them;
- observe mode, which every feature includes, is the baseline of features, not stock verl;
- keys that a prediction assumes are advised with its feature.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from verl_fuse.feature import SWITCH, Feature
from verl_fuse.simulate.compare import StrategyResult
from verl_fuse.simulate.recorded import Replay
from verl_fuse.spec.timeline import GENERATION

LEAST_GAIN_SHARE = 0.01
_LITTLE = f"less than {LEAST_GAIN_SHARE:.0%}"

Features = Mapping[str, Feature]
# Returns the refusals of two features together that neither has alone.
Excluded = Callable[[Feature, Feature], Sequence[str]]


@dataclass(frozen=True)
class Gain:
    """The predicted saving of a feature, beside observe mode: seconds a step, their share of the step, and the share
    of device time that it gives back. `sure`: more than its interval allows for chance. `at_most`: both are bounds,
    which no prediction of lengths can reach. `note`: how, or why nothing."""

    feature: str
    seconds: float
    share: float
    device_share: float
    note: str = ""
    sure: bool = True
    at_most: bool = False

    @property
    def worthwhile(self) -> bool:
        return self.sure and max(self.share, self.device_share) >= LEAST_GAIN_SHARE


@dataclass(frozen=True)
class Advice:
    """An advice is one sentence, its features with the overrides that switch them on, and the seconds a step that they
    save together, beside observe mode; `at_most`: a bound, since that of one of them is."""

    sentence: str
    features: tuple[str, ...]
    overrides: tuple[str, ...]
    saved: float
    at_most: bool


def advice_of_rows(
    rows: Sequence[StrategyResult],
    features: Features,
    excluded: Excluded,
    simulate: Callable[[str], StrategyResult],
) -> tuple[Advice, StrategyResult]:
    """Return the advice of simulated strategies, and the row of what is advised. `rows` are as `compare` returns them:
    the strategies that are one feature. `simulate` takes several with + between them; a feature that gains less than
    `LEAST_GAIN_SHARE` beside the others is not advised."""
    known = {row.strategy: row for row in rows}
    base = known["observe"] = known.get("observe") or simulate("observe")

    def gain(feature: str, without: StrategyResult, row: StrategyResult) -> Gain:
        seconds = without.seconds.mean - row.seconds.mean
        return Gain(
            feature=feature,
            seconds=seconds,
            share=seconds / base.seconds.mean,
            device_share=(without.device_hours - row.device_hours) / base.device_hours,
            note="; ".join(row.notes),
            sure=row.speedup.low > without.speedup.high or row.cost_ratio.high < without.cost_ratio.low,
        )

    def together(chosen: Sequence[Gain]) -> StrategyResult:
        strategy = "+".join(one.feature for one in chosen)
        if strategy and strategy not in known:
            known[strategy] = simulate(strategy)
        return known.get(strategy, base)

    def gains_beside(one: Gain, chosen: Sequence[Gain]) -> bool:
        others = [other for other in chosen if other is not one]
        needed = any(features[other.feature].beside == one.feature for other in others)
        return needed or replace(gain(one.feature, together(others), together(chosen)), sure=True).worthwhile

    gains = [
        gain(row.strategy, known.get(features[row.strategy].beside, base), row)
        for row in rows
        if row.strategy in features
    ]
    candidates = [*gains]
    while len(chosen := chosen_of(candidates, features, excluded)) > 1:
        # Of two that save the same, the one that gains less alone goes.
        idle = next((one for one in reversed(chosen) if not gains_beside(one, chosen)), None)
        if idle is None:
            break
        candidates.remove(idle)
    row = together(chosen)
    total = f"{row.seconds.mean:.2f} s a step, {_times(row)}"
    saved = base.seconds.mean - row.seconds.mean
    return advise(gains, chosen, saved, total, features, excluded, f"observe mode alone is {_times(base)}", SWITCH), row


def advice_of_replay(
    result: Replay, features: Features, excluded: Excluded, open_: Collection[str] | None = None
) -> Advice:
    """Return the advice of a recorded run, of the features that are `open_` (None: all): one after the other the one
    that saves most once those before it are on."""
    chosen: list[Gain] = []
    open_ = features.keys() if open_ is None else open_
    alone = gains = [gain for gain in gains_of_replay(result, features) if gain.feature in open_]
    while further := [gain for gain in gains if gain.worthwhile and _goes_with(gain, chosen, features, excluded)]:
        chosen.append(max(further, key=_most))
        savings = result.beside([one.feature for one in chosen])
        gains = [gain for gain in gains_of_replay(replace(result, savings=savings), features) if gain.feature in open_]
    seconds = sum(one.seconds for one in chosen)
    total = f"{seconds:.2f} s a step, {seconds / result.seconds:.0%}"
    return advise(alone, chosen, seconds, total, features, excluded, observed(result))


def gains_of_replay(result: Replay, features: Features) -> list[Gain]:
    """Return the known savings of features on a recorded run; one by replay that is below the replay's own error is
    not sure."""
    error = result.replay_error * result.stages.get(GENERATION, 0.0) / result.seconds
    return [
        Gain(
            feature=name,
            seconds=saving.seconds,
            share=saving.seconds / result.seconds,
            device_share=saving.device_share,
            note=saving.note,
            sure=not saving.replayed or max(saving.seconds / result.seconds, saving.device_share) > error,
            at_most=features[name].bound,
        )
        for name, saving in result.savings.items()
        if saving.known
    ]


def not_predicted(result: Replay, features: Features) -> dict[str, str]:
    """Return the features whose saving a recorded run does not tell, with what is known of it."""
    unknown = {name: saving.note for name, saving in result.savings.items() if not saving.known}
    return unknown | {name: feature.most(result.stages) for name, feature in features.items() if feature.most}


def observed(result: Replay) -> str:
    """Describe the saving of observe mode on a recorded run."""
    saved = result.observed.seconds
    return (
        f"observe mode alone saves {saved:.2f} s of the {result.seconds + saved:.2f} s that a step of stock verl would "
        "take"
    )


def advise(
    gains: Sequence[Gain],
    chosen: Sequence[Gain],
    saved: float,
    total: str,
    features: Features,
    excluded: Excluded,
    observed: str,
    switch: Sequence[str] = (),
) -> Advice:
    """Return the advice of the `chosen` among these gains, which save `saved` seconds together, with their `total` in
    words. `observed` tells the predicted effect of observe mode, `switch` are overrides that switch observe mode on
    where it is off."""
    names = tuple(gain.feature for gain in chosen)
    chosen_features = [features[name] for name in names]
    keys = [*(one.overrides for one in chosen_features), *(one.assumed for one in chosen_features)]
    overrides = (*switch, *dict.fromkeys(override for each in keys for override in each))
    named = ", ".join(f"{gain.feature} ({_amount(gain)})" for gain in chosen)
    none = f"switch no feature on: none is predicted to gain {LEAST_GAIN_SHARE:.0%} of a step"
    left_out = [gain for gain in gains if gain.worthwhile and gain.feature not in names]
    apart = [gain.feature for gain in left_out if not _goes_with(gain, chosen, features, excluded)]
    idle = [gain.feature for gain in left_out if gain.feature not in apart]
    others = [gain for gain in gains if not gain.worthwhile and gain.feature not in names]
    unsure = [gain.feature for gain in others if not gain.sure and gain.share >= LEAST_GAIN_SHARE]
    nothing = [gain.feature for gain in others if gain.feature not in unsure]
    parts = [f"switch on {named}" if chosen else none]
    parts += [f"together {total}"] if len(chosen) > 1 else []
    parts += [observed]
    parts += [f"{_listed(apart)} cannot be on together with that"] if apart else []
    parts += [f"{_listed(idle)} would gain {_LITTLE} beside that"] if idle else []
    parts += [f"the gain of {_listed(unsure)} is within the prediction's error"] if unsure else []
    parts += [f"{_LITTLE} is predicted from {_listed(nothing)}"] if chosen and nothing else []
    return Advice("; ".join(parts), names, overrides, saved, any(gain.at_most for gain in chosen))


def chosen_of(gains: Sequence[Gain], features: Features, excluded: Excluded) -> list[Gain]:
    """Return the features worth switching on together, the most seconds first."""
    chosen: list[Gain] = []
    for gain in sorted(gains, key=_most, reverse=True):
        if gain.worthwhile and _goes_with(gain, chosen, features, excluded):
            chosen.append(gain)
    return chosen


def _most(gain: Gain) -> tuple[float, float]:
    return gain.seconds, gain.device_share


def _goes_with(gain: Gain, chosen: Sequence[Gain], features: Features, excluded: Excluded) -> bool:
    """Tell whether a feature can be on together with others, and is not one of them."""
    one, others = features[gain.feature], [features[other.feature] for other in chosen]
    return not any(one.switch == other.switch or excluded(one, other) for other in others)


def _times(row: StrategyResult) -> str:
    speedup = row.speedup
    return f"{speedup.mean:.2f} times as fast as stock [{speedup.low:.2f}, {speedup.high:.2f}]"


def _amount(gain: Gain) -> str:
    seconds = f"{gain.seconds:.2f} s a step, {gain.share:.0%}" if gain.share >= LEAST_GAIN_SHARE else ""
    devices = (
        f"{gain.device_share:.0%} less device time in all" if gain.device_share >= gain.share + LEAST_GAIN_SHARE else ""
    )
    slower = f"steps {-gain.share:.0%} longer" if gain.share <= -LEAST_GAIN_SHARE else ""
    return ("at most " if gain.at_most else "") + ", ".join(part for part in (seconds, devices, slower) if part)


def _listed(names: Sequence[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
