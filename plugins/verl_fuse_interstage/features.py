"""The records of this plugin's features, and their savings on a recorded run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from verl_fuse.feature import Feature, Fits
from verl_fuse.simulate.saving import SCORE_STAGES, Saving
from verl_fuse.spec.composed import (
    ACTOR,
    MODEL,
    Get,
    has_adapters,
    has_critic,
    has_reference,
    one_replica,
    replica_devices,
)
from verl_fuse.spec.model_names import parameters_of_path

if TYPE_CHECKING:
    from verl_fuse.simulate.recorded import Recording


def _inferring(get: Get) -> list[str]:
    """Return the models that infer; LoRA's reference is the actor."""
    bypass = get("algorithm.rollout_correction.bypass_mode")
    old_log_probs = not bypass and not get("fuse.update.skip_old_log_prob")
    values = has_critic(get) and not get("fuse.update.skip_values")
    reference, adapters = has_reference(get), has_adapters(get)
    actor = old_log_probs or (reference and adapters)
    infers = {"actor": actor, "reference": reference and not adapters, "critic": values}
    return [model for model, needed in infers.items() if needed]


def _nothing_to_infer(get: Get) -> str | None:
    if not _inferring(get):
        return "there is neither an old log-prob pass, nor a reference, nor a pass for values"
    return one_replica(get)


def _copies(get: Get) -> str:
    """Tell the host memory of slices in 16 bits, where the models' names tell sizes with its least number of bytes:
    torch pins up to twice as much."""
    models = _inferring(get)
    devices = get("trainer.n_gpus_per_node") or 1
    count = max(1, devices // replica_devices(get))
    twice = get(f"{ACTOR}.strategy") == "fsdp"
    paths = ("critic.model.path" if model == "critic" else f"{MODEL}.path" for model in models)
    sizes = [parameters_of_path(get(path)) or 0 for path in paths]
    each_gb = count * (4 if twice else 2) / 1e9
    of_seven = f" (with 7 billion each {7e9 * len(models) * each_gb:.0f} GB)"
    least = f": at least {sum(sizes) * each_gb:.0f} GB" if all(sizes) else of_seven
    each = "4 bytes a parameter (2 with strategy=fsdp2)" if twice else "2 bytes a parameter"
    keep = f"{count} replicas keep copies" if count > 1 else "a replica keeps a copy"
    held = " and ".join(models)
    fsdp, wide = get(f"{ACTOR}.strategy") != "megatron", replica_devices(get)
    untried = f"; of FSDP no slices of {wide} devices were run" if fsdp and wide > 1 else ""
    return f"host memory: on each node {keep} of {held}, {each}{least}; counted anew before step 1{untried}"


def _moved_tail(run: "Recording") -> Saving:
    from verl_fuse.simulate.tail import migrated, trigger_time, unmigrated

    threshold, inference = run.threshold, run.inference
    if not threshold.threshold:
        shared = "devices are shared and saturated" if not run.dedicated else "no threshold is predicted to gain"
        return Saving(f"no tail is moved: {shared}")
    saved = []
    for rollout, end in zip(run.begun, run.through, strict=True):
        time = trigger_time(end, threshold.threshold)
        fused = migrated(rollout.advance(time), time, threshold.survivors, inference, run.moving)
        saved.append(unmigrated(end, inference).seconds - fused.seconds)
    share = threshold.threshold / len(run.begun[0].requests)
    kept = f"{threshold.survivors} of {run.begun[0].replicas} replicas kept"
    note = f"the tail is moved once {share:.0%} of the batch are left; {kept}"
    seconds, hidden = max(0.0, sum(saved) / len(saved)), sum(run.stages.get(stage, 0.0) for stage in SCORE_STAGES)
    share = min(1.0, seconds / hidden) if hidden else 0.0
    return Saving(note, seconds, replayed=True, stages=dict.fromkeys(SCORE_STAGES, share))


def _all_of_inference(stages: Mapping[str, float]) -> str:
    inference = sum(stages.get(stage, 0.0) for stage in SCORE_STAGES)
    return (
        f"saves at most the {inference:.2f} s of inference, and nothing where generation keeps the devices busy; "
        "`verl-fuse ab` measures it"
    )


FEATURES = (
    Feature("streaming", {"interstage.enabled": True}, strategy="streaming", most=_all_of_inference),
    Feature(
        "interstage",
        {"interstage.enabled": True, "interstage.layout": "slices", "interstage.migration_threshold": "auto"},
        presets={"fast": {}},
        idle=_nothing_to_infer,
        takes=_copies,
        measured=1.27,
        strategy="interstage",
        saving=_moved_tail,
        fits=Fits(
            "slices, moving tail",
            "PPO; GRPO with reference or old log-probs",
            "FSDP, FSDP2, Megatron",
            "vLLM, several replicas",
            "FSDP: replicas of one device; Megatron: of two",
        ),
    ),
)
