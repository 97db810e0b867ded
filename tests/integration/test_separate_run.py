"""verl's own trainer `separate_async` over checkpoint engine `fuse`: GRPO on two FSDP2 ranks, one standalone vLLM
replica of two tensor-parallel workers."""

import os
from pathlib import Path

import pytest
from verl_runs import SMALL, Finished, run

torch = pytest.importorskip("torch")
pytest.importorskip("verl")
pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(os.environ.get("VERL_FUSE_LONG") != "1", reason="takes minutes: VERL_FUSE_LONG=1"),
]

STEPS, TP, PROMPTS = 3, 2, 4
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"
SETTINGS = (
    *SMALL,
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    f"data.train_batch_size={PROMPTS}",
    # Nothing generates on the training devices.
    "actor_rollout_ref.hybrid_engine=false",
    "actor_rollout_ref.rollout.nnodes=1",
    f"actor_rollout_ref.rollout.n_gpus_per_node={TP}",
    f"actor_rollout_ref.rollout.tensor_model_parallel_size={TP}",
    # A process per worker.
    "actor_rollout_ref.rollout.engine_kwargs.vllm.distributed_executor_backend=mp",
    f"{ENGINE}.backend=fuse",
    f"{ENGINE}.custom_backend_module=verl_fuse_realloc.sync.checkpoint_engine",
    "ray_kwargs.ray_init.num_gpus=4",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=-1",
)


@pytest.fixture(scope="module")
def finished(verl_home) -> Finished:
    record = verl_home / "separate.numbers"
    # verl 0.9.1 passes its logger an argument it does not know when it says that nothing generates
    # on the training devices.
    quiet = {"VERL_LOGGING_LEVEL": "WARN"}
    done = run(
        verl_home, "grpo-cpu", *SETTINGS, name="separate", record=record, recorder="rollout_recorder", variables=quiet
    )
    assert done.code == 0, done.output[-4000:]
    return done


def trained(folder: Path, step: int) -> dict[str, "torch.Tensor"]:
    """Whole parameters after the update of a step, from what both ranks saved of them."""
    shards = [torch.load(folder / f"actor_{step}_rank{rank}.pt") for rank in range(2)]
    return {name: torch.cat([shard[name] for shard in shards]) for name in shards[0]}


def part(whole: dict[str, "torch.Tensor"], name: str, rank: int) -> "torch.Tensor":
    """Return the tensor that the worker `rank` of the replica should hold under vLLM's name."""
    for fused, names in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
        if fused in name:
            return torch.cat([whole[name.replace(fused, one)].chunk(TP)[rank] for one in names])
    if "o_proj" in name or "down_proj" in name:
        return whole[name].chunk(TP, dim=1)[rank]
    return whole[name]


def test_every_update_reaches_each_worker_bitwise(finished):
    folder = finished.folder.with_name("separate.numbers")
    changed = []
    for step in range(1, STEPS + 1):
        whole = trained(folder, step)
        for rank in range(TP):
            held = torch.load(folder / f"rollout_0_{step}_rank{rank}.pt")
            assert len(held) > 10
            for name, tensor in held.items():
                if "embed_tokens" in name or "lm_head" in name:
                    # Rows of the vocabulary, which is padded at the end.
                    wanted = whole[name][rank * len(tensor) :][: len(tensor)]
                    tensor = tensor[: len(wanted)]
                else:
                    wanted = part(whole, name, rank)
                assert torch.equal(tensor, wanted), (step, rank, name)
        changed.append(whole["model.norm.weight"])
    assert not torch.equal(changed[0], changed[-1]), "training changed them"


def test_the_run_trains_on_what_the_replica_generates(finished):
    assert sorted(finished.metrics) == list(range(1, STEPS + 1))
    assert max(metrics["training/off_policy/trajectory_staleness/max"] for metrics in finished.metrics.values()) <= 1
    # Groups of four answers that are all right or all wrong teach nothing, in some steps all of them.
    assert max(metrics["actor/grad_norm"] for metrics in finished.metrics.values()) > 0
