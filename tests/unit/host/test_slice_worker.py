"""One call on a slice: every rank computes every stage that is asked for. No engine, no Ray."""

import warnings
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")
with warnings.catch_warnings():
    # Ray and its dependencies warn when they are imported.
    warnings.simplefilter("ignore")
    import torch
    from tensordict import TensorDict
    from verl.utils.tensordict_utils import assign_non_tensor

    from verl_fuse.host.record.spans import Recorder
    from verl_fuse_interstage.slices import worker as slice_worker

STAGES = ("old_log_prob", "ref", "values")


@pytest.fixture
def infer(monkeypatch):
    """(stages computed, fields returned) of a call on a rank whose engines return `found` for each stage."""

    def call(found, asked=STAGES):
        computed, loaded = [], []

        def compute(stage, model, data, temperature):
            assert loaded[-1] == stage, "its weights are on the device"
            computed.append((stage, temperature, sorted(data.keys())))
            return found(stage, data)

        monkeypatch.setattr(slice_worker, "compute", compute)
        monkeypatch.setattr(slice_worker, "remote_recorder", lambda: Recorder(lambda span: None))
        worker = object.__new__(slice_worker.SliceWorker)
        worker._stages, worker._number, worker._models = STAGES, 0, dict.fromkeys(STAGES)
        worker._device_weights = {
            stage: SimpleNamespace(load=lambda stage=stage: loaded.append(stage)) for stage in STAGES
        }
        data = TensorDict({"responses": torch.ones(2, 3)}, batch_size=2)
        assign_non_tensor(data, temperature=0.5, stages=" ".join(asked))
        return computed, worker.infer(data)

    return call


def test_a_rank_without_outputs_takes_part_in_every_stage(infer):
    """With sequence parallelism each stage is a collective of all ranks, of which one holds the output."""
    computed, fields = infer(lambda stage, data: None)
    assert computed == [(stage, 0.5, ["responses"]) for stage in STAGES]
    assert fields is None


def test_the_fields_of_the_stages_that_were_asked_for_come_back(infer):
    computed, fields = infer(lambda stage, data: {f"of {stage}": data["responses"]}, asked=("values", "ref"))
    assert [stage for stage, *_ in computed] == ["ref", "values"]
    assert sorted(fields.keys()) == ["of ref", "of values"]
    assert fields.batch_size == (2,)
