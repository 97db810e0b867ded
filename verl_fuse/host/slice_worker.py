"""The worker of a slice: forward-only copies of all models a finished sample goes through, on the devices of one rollout replica.

The reference is verl's own (role "ref", forward-only: parameters in host memory between calls). Actor and critic are built the same way and
take new weights once per step. One call computes every model for a micro-group and returns the fields under their final names.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import ray
from tensordict import TensorDict
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.tensordict_utils import assign_non_tensor
from verl.utils.tensordict_utils import get as get_value
from verl.workers.config import TrainingWorkerConfig
from verl.workers.engine_workers import ActorRolloutRefWorker, TrainingWorker
from verl.workers.utils.padding import response_from_nested

from verl_fuse.host.spans import remote_recorder
from verl_fuse.host.weights import load_parameters
from verl_fuse.spec.step import Stage

# Stage -> (output of the model, field it is stored as).
OUTPUTS: Mapping[Stage, tuple[tuple[str, str], ...]] = {
    "old_log_prob": (("log_probs", "old_log_probs"), ("entropy", "entropy")),
    "ref": (("log_probs", "ref_log_prob"),),
    "values": (("values", "values"),),
}


class SliceWorker(ActorRolloutRefWorker):
    """`stages`: what to compute; `critic` is verl's critic block, needed for "values"; `number` is the rank of the slice's replica."""

    def __init__(self, config: Any, stages: Sequence[Stage], critic: Any, number: int, **kwargs: Any):
        super().__init__(config=config, role="ref", **kwargs)
        self._stages, self._critic, self._number = tuple(stages), critic, number
        self._models: dict[Stage, TrainingWorker] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def init_model(self) -> None:
        super().init_model()
        assert self.ref is not None
        # A run without a reference needs the model verl builds for it all the same: as the actor's copy.
        built = "ref" if "ref" in self._stages else "old_log_prob"
        for stage in self._stages:
            self._models[stage] = self.ref if stage == built else self._copy(stage, self.ref.config)

    def _copy(self, stage: Stage, reference: TrainingWorkerConfig) -> TrainingWorker:
        wanted = deepcopy(reference)
        if stage == "values":
            critic: Any = omega_conf_to_dataclass(self._critic)
            wanted = replace(wanted, model_type="value_model", model_config=critic.model)
        model = TrainingWorker(config=wanted)
        model.reset()
        return model

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)  # pyright: ignore[reportAttributeAccessIssue]
    def load_weights(self, weights: Mapping[Stage, Sequence[ray.ObjectRef]]) -> None:
        """Take over the parameters that the training ranks left in Ray's object store (`export_parameters`), per stage."""
        with remote_recorder().span("load_weights", f"slice {self._number}", "sync"):
            for stage, buckets in weights.items():
                load_parameters(self._models[stage].engine, buckets)

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="ref"))
    def infer(self, data: TensorDict) -> TensorDict | None:
        """Fields of the stages that `data` names, for its rows, one value per response token; None on ranks that hold no output."""
        temperature = get_value(data, "temperature")
        asked = set(get_value(data, "stages").split())
        given = [key for key in data.keys() if key not in ("temperature", "stages")]  # noqa: SIM118
        fields: dict[str, Any] = {}
        recorder = remote_recorder()
        for stage in filter(asked.__contains__, self._stages):
            rows = data.select(*given).clone(recurse=False)
            assign_non_tensor(
                rows, temperature=temperature, compute_loss=False, calculate_entropy=stage == "old_log_prob"
            )
            with recorder.span(stage, f"slice {self._number}", "inference", samples=len(data)):
                output = self._models[stage].infer_batch(rows)
            if output is None:
                return None
            for name, field in OUTPUTS[stage]:
                fields[field] = response_from_nested(output[name], data["response_mask"])
        return TensorDict(fields, batch_size=len(data)).cpu()
