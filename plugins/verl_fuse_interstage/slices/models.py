"""The models of a slice: forward-only copies, each built by verl's own code from the configuration of its own model.

verl builds the policy's copy and the reference as it builds them for training (role "actor" and role "ref"), and the
critic's copy from the configuration of the critic's workers. Forward-only engines keep their parameters in host memory
between calls and have no optimizer. Megatron's copies may be cut otherwise than their models (megatron_copies.py). With
LoRA verl's reference is the policy without its adapters, so one copy serves both.

Invariants (tests/integration/test_slice_models.py):
- parameters are kept in the dtype they are computed in, or the narrower one they are trained in;
- with the parameters of its model, a copy computes the numbers of its model, whatever the settings of the other models
  are;
- only the models of the given stages are built, and no setting of another model is read;
- with LoRA old log-probs and reference have one model, whose adapters the reference is computed without.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf
from tensordict import TensorDict
from verl.utils.tensordict_utils import assign_non_tensor
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import response_from_nested

from verl_fuse.host.inference.response_logits import keep_response_logits
from verl_fuse.host.weights.computed import computed_dtype, round_parameters
from verl_fuse.spec.step import Stage
from verl_fuse_interstage.slices.megatron_copies import copy_settings

# Stage -> (output of the model, field it is stored as).
OUTPUTS: Mapping[Stage, tuple[tuple[str, str], ...]] = {
    "old_log_prob": (("log_probs", "old_log_probs"), ("entropy", "entropy")),
    "ref": (("log_probs", "ref_log_prob"),),
    "values": (("values", "values"),),
}
# verl's order: a model may patch classes of its process for the models after it.
_ORDER: tuple[Stage, ...] = ("values", "ref", "old_log_prob")
# A trained model without a dtype has this one; verl would give a forward-only one bfloat16.
_TRAINED_DTYPE = "fp32"


class _Model(TrainingWorker):
    """verl's worker of one model, whose parameters are rounded before verl shards, offloads and pins them."""

    def reset(self) -> None:
        if self.engine_config.strategy == "megatron":
            # It keeps parameters in the dtype it computes in.
            super().reset()
            return
        sharded: Any = self.engine
        wrap, computed = sharded._build_fsdp_module, computed_dtype(sharded.engine_config)
        sharded._build_fsdp_module = lambda module: wrap(round_parameters(module, computed))
        super().reset()
        del sharded._build_fsdp_module


class _Policy(ActorRolloutRefWorker):
    """verl's worker of actor or reference."""

    actor_worker_cls = ref_worker_cls = _Model


def build_models(
    stages: Sequence[Stage],
    block: DictConfig,
    critic: TrainingWorkerConfig | None,
    devices: int = 1,
    response_logits: bool = False,
    shared_prompts: bool = False,
) -> dict[Stage, TrainingWorker]:
    """Build the model of each of `stages`, by all `devices` ranks of a slice: `block` is verl's `actor_rollout_ref`,
    `critic` is verl's configuration for the critic's workers ("values"). With `response_logits` policy and reference
    compute logits of responses alone, and with `shared_prompts` all compute each prompt once, where their models
    can."""
    # In these settings engines of Megatron copies differ from those of their models.
    trained = [] if critic is None else [critic.engine_config]
    megatron = block.actor.strategy == "megatron"
    changes = copy_settings([block.actor.megatron, *trained], devices) if megatron else {}
    of_policy: Stage = "old_log_prob" if block.model.lora_rank > 0 else "ref"
    wanted: list[Stage] = [stage for stage in _ORDER if stage in stages]
    source: list[Stage] = [of_policy if stage == "ref" else stage for stage in wanted]
    models: dict[Stage, TrainingWorker] = {
        stage: _built(stage, block, critic, changes) for stage in dict.fromkeys(source)
    }
    for stage, model in models.items():
        if response_logits and stage != "values":
            keep_response_logits(model.engine, strict=False)
        if shared_prompts:
            # It takes private names of transformers.
            from verl_fuse.host.sharing.engine import share_prompts

            share_prompts(model.engine, strict=False)
    return {stage: models[of] for stage, of in zip(wanted, source, strict=True)}


def compute(stage: Stage, model: TrainingWorker, data: TensorDict, temperature: float) -> dict[str, Any] | None:
    """Return the fields of `stage` for the rows of `data`, one value per response token; None on ranks that hold no
    output."""
    rows = data.clone(recurse=False)
    assign_non_tensor(rows, temperature=temperature, compute_loss=False, calculate_entropy=stage == "old_log_prob")
    if stage == "ref" and model.model_config.lora_rank > 0:
        assign_non_tensor(rows, no_lora_adapter=True)
    output = model.infer_batch(rows)
    if output is None:
        return None
    return {field: response_from_nested(output[name], data["response_mask"]) for name, field in OUTPUTS[stage]}


def _built(
    stage: Stage, block: DictConfig, critic: TrainingWorkerConfig | None, changes: Mapping[str, Any]
) -> TrainingWorker:
    if stage == "values":
        assert critic is not None, "values need a critic"
        engine: Any = critic.engine_config
        copied = replace(engine, **(changes or _forward_only(engine)))
        model = _Model(config=replace(critic, engine_config=copied))
        model.reset()
        return model
    # verl changes the block it builds a model from.
    block = deepcopy(block)
    role = "ref" if stage == "ref" else "actor"
    if changes:
        for key, value in changes.items():
            OmegaConf.update(block, f"{role}.megatron.{key}", value, force_add=True)
    elif stage == "old_log_prob":
        for key, value in _forward_only(block.actor.fsdp_config).items():
            OmegaConf.update(block.actor.fsdp_config, key, value)
    if stage == "old_log_prob":
        # A copy sends its weights to nobody.
        OmegaConf.update(block, "rollout.checkpoint_engine.backend", "naive")
    worker = _Policy(config=block, role=role)
    worker.init_model()
    found = worker.ref if stage == "ref" else worker.actor
    assert found is not None
    return found


def _forward_only(engine: Any) -> dict[str, Any]:
    """Return the settings in which an FSDP engine of a copy differs from its model's engine."""
    return {"forward_only": True, "model_dtype": engine.model_dtype or _TRAINED_DTYPE}
