"""Replaying recorded steps."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from setups import NO_POLL, h100, ppo

from verl_fuse import plugins
from verl_fuse.advice import advice_of_replay
from verl_fuse.cost.drafter import FIGURES
from verl_fuse.errors import FuseError
from verl_fuse.simulate.options import SimulationOptions
from verl_fuse.simulate.recorded import DecodeFit, ReplayedStep, fit_decode, read_recorded, replay
from verl_fuse.simulate.rollout import Requests, RolloutState, round_robin
from verl_fuse.simulate.step import simulate_step
from verl_fuse.simulate.stock import stock_plan
from verl_fuse.spec.timeline import Span, Timeline

SAVINGS = {name: one.saving for name, one in plugins.features(plugins.load()).items() if one.saving}


def step(seed: int = 0, fit: DecodeFit = DecodeFit(0.1, 2e-3, 1e-4), stages: dict | None = None) -> ReplayedStep:  # noqa: B008
    """256 samples on four replicas that decode exactly as the fit assumes."""
    rng = np.random.default_rng(seed)
    response = np.clip(rng.lognormal(np.log(200), 1.1, 256).astype(int), 1, 2048)
    blank = ReplayedStep(
        1, 20.0, stages or {"gen": 9.3, "ref": 2.0, "values": 1.0, "update_critic": 3.0, "update_actor": 4.0},
        np.arange(256) % 4, np.full(256, 50), response, np.zeros(256), np.ones(256),
    )  # fmt: skip
    queues = round_robin(256, 4)
    done = RolloutState.begin(Requests.of(blank.prompt, response), fit.timing(blank), queues).advance()
    return ReplayedStep(1, 20.0, blank.stages, blank.replica, blank.prompt, response, np.zeros(256), done.finish)


def ask(*steps: ReplayedStep, dedicated: bool = True, latency: float = 0.05, **mini_batches: int):
    options = SimulationOptions(dedicated=dedicated, migration_latency=latency)
    return replay(steps, options, SAVINGS, mini_batches=mini_batches)


def test_the_fit_finds_the_speed_of_the_replicas():
    fit = fit_decode(step(fit=DecodeFit(0.1, 2e-3, 1e-4)))
    assert fit.startup == pytest.approx(0.1, abs=0.01)
    assert fit.step == pytest.approx(2e-3, rel=0.02)
    assert fit.per_sequence == pytest.approx(1e-4, rel=0.02)


def test_no_coefficient_is_negative():
    recorded = step()
    noisy = ReplayedStep(
        1, 20.0, {}, recorded.replica, recorded.prompt, recorded.response, recorded.start,
        np.random.default_rng(0).uniform(1.0, 2.0, 256),
    )  # fmt: skip
    fit = fit_decode(noisy)
    assert min(fit.startup, fit.step, fit.per_sequence) >= 0


def test_a_replay_takes_as_long_as_the_run():
    assert ask(step(0), step(1)).replay_error < 0.01


def test_what_every_feature_would_have_saved():
    found = ask(step(0), step(1))
    assert found.observed.seconds == pytest.approx(0.7)
    savings = found.savings
    assert savings.keys() == {
        "interstage", "pipeline", "speculation", "zero_gradient", "old_log_prob", "values", "share_prompts",
        "stream", "scaling",
    }  # fmt: skip
    assert 0.5 < savings["interstage"].seconds < 3.0
    assert savings["pipeline"].seconds == 0
    assert "at most 3.00 s" in savings["pipeline"].note
    assert savings["scaling"].device_share > 0
    assert savings["interstage"].replayed
    assert savings["scaling"].replayed


def test_what_drafts_would_have_saved():
    def saving(options: SimulationOptions, on: Sequence[str] = (), accelerator: bool = False, each: float = 1e-4):
        steps = [step(seed, DecodeFit(0.1, 2e-3, each)) for seed in (0, 1)]
        return replay(steps, options, SAVINGS, on, accelerator).savings["speculation"]

    unknown, some, more = (saving(SimulationOptions(acceptance=share)) for share in (None, 0.5, 0.9))
    assert unknown.seconds == 0
    assert "--set acceptance=SHARE" in unknown.note
    # Half of the pass is the fixed cost, once fewer than 20 samples of a replica run.
    assert 0.5 < some.seconds < more.seconds < 9
    on = saving(SimulationOptions(acceptance=0.9), on=["speculation"])
    assert (on.seconds, on.note[:9]) == (0, "it was on")
    assert not any(FIGURES in one.note for one in (unknown, some, more, on))
    costly = [saving(SimulationOptions(acceptance=share), accelerator=True) for share in (None, 0.0, 0.5)]
    assert all(one.note.endswith(f"; {FIGURES}") for one in costly)
    assert [one.seconds for one in costly] == [0, 0, 0]
    # Where further tokens of a pass are all but free, drafts pay for the drafter.
    cheap = [saving(SimulationOptions(acceptance=0.9), accelerator=on, each=1e-6).seconds for on in (True, False)]
    assert 0 < cheap[0] < cheap[1]
    on = saving(SimulationOptions(acceptance=0.9), on=["speculation"], accelerator=True)
    assert on.note == f"it was on: the replay decodes as fast as the run did with drafts; {FIGURES}"


def test_what_an_update_could_have_left_out():
    plain = step(stages={"gen": 9.3, "old_log_prob": 2.0, "adv": 0.5, "update_actor": 6.0})

    def found(*steps: ReplayedStep):
        savings = ask(*steps).savings
        return [savings[name] for name in ("zero_gradient", "old_log_prob")]

    zero, old = found(plain)
    assert (zero.seconds, old.seconds) == (0.0, pytest.approx(2.0))
    assert "does not say" in zero.note
    zero, _ = found(*(replace(plain, zero_gradient=share) for share in (0.25, 0.75)))
    assert (zero.seconds, zero.note) == (pytest.approx(3.0), "50% of the tokens had no gradient")
    skipping = replace(plain, zero_gradient=0.5, skipped=True, own_log_probs=True)
    for steps in ([skipping], [replace(plain, zero_gradient=0.5), skipping]):
        on = found(*steps)
        assert [saving.seconds for saving in on] == [0.0, 0.0]
        assert all(saving.note.startswith("it was on") for saving in on)
    zero, _ = found(replace(plain, zero_gradient=0.5), plain)
    assert "does not say" in zero.note
    old = ask(plain, actor=4, critic=2).savings["old_log_prob"]
    assert (old.seconds, old.note) == (pytest.approx(0.5), "the first of 4 mini-batches computes the same")


def test_prompts_that_could_have_been_computed_once():
    plain = step(stages={"gen": 9.3, "old_log_prob": 2.0, "ref": 1.0, "update_actor": 6.0})
    eights = replace(plain, group=np.arange(256) // 8)
    of_prompts = 256 * 50 / int((plain.prompt + plain.response).sum())

    def found(step: ReplayedStep, mini_batches: int = 1, **options):
        return replay([step], NO_POLL, SAVINGS, mini_batches={"actor": mini_batches}, **options).savings[
            "share_prompts"
        ]

    assert found(eights).seconds == pytest.approx(of_prompts * 7 / 8 * 9.0)
    four = found(eights, 4)
    assert four.seconds == pytest.approx(of_prompts * (0.55 * 6.0 + 7 / 8 * 3.0), rel=1e-3)
    update, passes = of_prompts * 0.55, of_prompts * 7 / 8
    assert four.note == (f"{update:.0%} of the tokens of the update, {passes:.0%} of a pass are such copies")
    assert found(replace(plain, group=np.arange(256))).seconds == 0
    assert found(plain).note == "the run does not say which samples are of one prompt"
    turns = found(replace(eights, prompt=np.where(np.arange(256) == 9, 51, 50)))
    assert (turns.seconds, turns.note[:26]) == (0, "samples have several turns")
    assert found(eights, on=["share_prompts"]).note.startswith("it was on")
    assert found(eights, on=["share_prompts"]).seconds == 0


def test_what_features_save_beside_each_other():
    plain = step(stages={"gen": 9.3, "old_log_prob": 2.0, "ref": 1.0, "update_actor": 6.0})
    run = ask(replace(plain, zero_gradient=0.5, group=np.arange(256) // 8))
    alone, copies = run.savings, 256 * 50 / int((plain.prompt + plain.response).sum()) * 7 / 8
    assert run.beside(()) == alone
    after = run.beside(("zero_gradient",))
    assert after["share_prompts"].seconds == pytest.approx(copies * (6.0 * 0.5 + 3.0))
    assert after["interstage"] == alone["interstage"], "an update is nothing that is hidden"
    after = run.beside(("zero_gradient", "old_log_prob"))
    assert after["share_prompts"].seconds == pytest.approx(copies * (6.0 * 0.5 + 1.0))
    assert 0 < after["interstage"].seconds < alone["interstage"].seconds
    hidden = run.beside(("interstage",))
    assert hidden["old_log_prob"].seconds == pytest.approx(2.0 - 2 / 3 * alone["interstage"].seconds)
    assert hidden["zero_gradient"].seconds == pytest.approx(3.0)


def test_values_that_the_critics_update_could_have_computed():
    def found(step: ReplayedStep):
        return ask(step).savings["values"]

    plain = step(stages={"gen": 9.3, "values": 1.5, "update_critic": 5.0, "update_actor": 6.0})
    assert found(plain).seconds == pytest.approx(1.5)
    values = ask(plain, actor=4, critic=2).savings["values"]
    assert (values.seconds, values.note) == (pytest.approx(0.75), "the first of 2 mini-batches computes the same")
    assert found(replace(plain, own_values=True)).note.startswith("it was on")
    assert ask(plain, replace(plain, own_values=True)).savings["values"].note.startswith("it was on")
    assert found(step(stages={"gen": 9.3, "update_actor": 6.0})).note == "no critic was trained"
    for stage in ("fused_update", "defer_critic"):
        assert found(step(stages={"gen": 9.3, "values": 1.5, stage: 1.0})).seconds == 0


def test_a_step_says_what_has_no_gradient_and_what_its_update_left_out():
    request = Span("r", "replica 0", "generate", 0.0, 1.0, {"prompt_tokens": 1, "response_tokens": 1})
    stages = (
        Span("adv", "step", "stage", 1.0, 2.0, {"zero_gradient_tokens": 0.4}),
        Span("update_critic", "step", "stage", 2.0, 2.5, {"own_values": 1.0}),
        Span("update_actor", "step", "stage", 2.5, 3.0, {"skipped_tokens": 0.4, "own_log_probs": 1.0}),
    )
    read = read_recorded(Timeline("run", 1, 0.0, 3.0, (request, *stages)))
    assert (read.zero_gradient, read.skipped, read.own_log_probs, read.own_values) == (0.4, True, True, True)
    bare = [replace(span, args={}) for span in stages]
    read = read_recorded(Timeline("run", 1, 0.0, 3.0, (request, *bare)))
    assert (read.zero_gradient, read.skipped, read.own_log_probs, read.own_values) == (None, False, False, False)


def test_shared_devices_save_nothing_by_overlap_or_by_fewer_replicas():
    savings = ask(step(), dedicated=False).savings
    assert (savings["interstage"].seconds, savings["interstage"].note) == (
        0.0,
        "no tail is moved: devices are shared and saturated",
    )
    assert (savings["scaling"].seconds, savings["scaling"].device_share) == (0.0, 0.0)


def test_savings_are_never_negative():
    result = ask(step(), latency=50.0)
    assert all(saving.seconds >= 0 and saving.device_share >= 0 for saving in result.savings.values())


def test_seconds_that_device_time_costs_are_subtracted():
    features, options = plugins.features(plugins.load()), SimulationOptions(dedicated=True, time_weight=0.0)
    result = replay([step()], options, SAVINGS)
    slower = result.savings["scaling"]
    assert slower.device_share > 0.1
    assert slower.note.endswith(f"; {-slower.seconds:.2f} s longer")
    advice = advice_of_replay(result, features, lambda one, other: (), ["values", "scaling"])
    assert advice.features == ("values", "scaling")
    assert advice.saved == pytest.approx(result.savings["values"].seconds + slower.seconds)
    assert advice.saved < 0


def test_without_a_critic_there_is_no_pipeline():
    assert ask(step(stages={"gen": 9.3, "ref": 2.0})).savings["pipeline"].note == "no critic was trained"


def test_a_fused_update_has_nothing_left_to_fuse():
    note = ask(step(stages={"gen": 9.3, "fused_update": 2.0})).savings["pipeline"].note
    assert note == "it was on: critic and actor trained as one"


def test_a_simulated_timeline_reads_like_a_recorded_one():
    cost, workload = h100(), ppo()
    result = simulate_step(
        workload, stock_plan(workload, cost, NO_POLL), cost, "stock", np.random.default_rng(0), NO_POLL
    )
    recorded = read_recorded(result.spans)
    assert recorded.generation == pytest.approx(result.stages["gen"])
    assert np.sort(recorded.response).tolist() == np.sort(result.lengths.response).tolist()
    assert ask(recorded).replay_error < 0.05


def test_a_timeline_without_requests_is_refused():
    spans = (Span("gen", "step", "stage", 0, 1), Span("request", "replica 0", "generate", 0, 1))
    with pytest.raises(
        FuseError, match=r"run, step 3: 1 requests on replicas with token counts; needs a step recorded"
    ):
        read_recorded(Timeline("run", 3, 0, 1, spans))


def timed(*seconds: float) -> Timeline:
    tokens = {"prompt_tokens": 5, "response_tokens": 9}
    requests = [Span("request", f"replica {i % 2}", "generate", 1.0, 1.0 + s, tokens) for i, s in enumerate(seconds)]
    return Timeline("run", 3, 0.0, 4.0, (Span("gen", "step", "stage", 0.0, 3.0), *requests))


def test_requests_of_no_length_are_replayed_beside_others():
    assert np.isfinite(ask(read_recorded(timed(0.0, 2.0, 1.0, 2.0))).replay_error)


def test_a_step_whose_requests_took_no_time_is_refused():
    with pytest.raises(FuseError, match="run, step 3: all its requests took 0 s; needs requests that took time"):
        read_recorded(timed(0.0, 0.0))


def test_a_run_that_migrated_is_refused():
    spans = (Span("request", "replica 0", "generate", 0, 1, {"response_tokens": 3, "resumed_tokens": 2}),)
    with pytest.raises(FuseError, match="samples migrated already"):
        read_recorded(Timeline("run", 3, 0, 1, spans))


def saved_by_stream(recorded: ReplayedStep, **options):
    return ask(recorded, **options).savings["stream"]


def test_an_update_in_the_tail_would_have_saved_what_complete_groups_take():
    recorded = replace(step(0), stages={"gen": 10.0, "update_actor": 8.0}, group=np.arange(256) // 8)
    found = saved_by_stream(recorded)
    assert 0 < found.seconds < 8.0
    assert "of the update before generation ends" in found.note
    alone = saved_by_stream(replace(recorded, group=np.arange(256)))
    assert alone.seconds > found.seconds, "a sample that waits for no other is complete earlier"
    whole = saved_by_stream(replace(recorded, group=np.zeros(256, int)))
    assert whole.seconds == pytest.approx(0.0, abs=1e-9), "all devices take as long as they did"


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"group": None}, "does not say which samples"),
        ({"streamed": True}, "it was on"),
        ({"stages": {"update_actor": 8.0, "update_critic": 8.0}}, "with a critic"),
    ],
)
def test_why_no_update_would_have_been_streamed(changed, said):
    recorded = replace(step(0), stages={"update_actor": 8.0}, group=np.arange(256) // 8)
    found = saved_by_stream(replace(recorded, **changed))
    assert (found.seconds, said in found.note) == (0.0, True)
    assert "shared and saturated" in saved_by_stream(recorded, dedicated=False).note
