"""Lists efficiencies of devices and floors of engines, each with its source. README.md names the fitted numbers, the
runs that they were fitted to, and the errors.

`calibrated on …`: chosen so that the analytic model meets these published measurements. `assumed`: a guess that nothing
published here tests.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from verl_fuse.errors import FuseError
from verl_fuse.spec.block import bounded, read_block
from verl_fuse.spec.cluster import Device


@dataclass(frozen=True)
class Efficiency:
    """The fractions of its peak figures that a device reaches: matrix products, attention, memory, links between
    devices."""

    matmul: float
    attention: float
    bandwidth: float
    network: float


_SECONDS = bounded(0.0)


@dataclass(frozen=True)
class EngineFloors:
    """Seconds that the software adds.

    The least one block takes in a forward (`block`, and under FSDP `sharded_block`) and in a decode step
    (`decode_block`); one collective between tensor ranks, and what more it takes between nodes (`remote`); one decode
    step, and each sequence running in it; one request; one inference or training call, each of its tokens (on the
    driver), each of its sequences (`row`: read from verl's queue, and its results written), each of its micro-batches,
    their backward passes (`backward`), and each optimizer step; handing new weights to the rollout, and each byte of
    the model then. `traffic` multiplies memory traffic outside matrix products, `sharded_traffic` that of FSDP once
    more: one is fused kernels. `overlap`: the host prepares a decode step while the device computes the one before, so
    that a step takes the longer of the two, and `handover` beside it.
    """

    name: str
    block: float = field(metadata=_SECONDS)
    decode_block: float = field(metadata=_SECONDS)
    collective: float = field(metadata=_SECONDS)
    decode_step: float = field(metadata=_SECONDS)
    call: float = field(metadata=_SECONDS)
    traffic: float = field(default=1.0, metadata=_SECONDS)
    sequence: float = field(default=0.0, metadata=_SECONDS)
    request: float = field(default=0.0, metadata=_SECONDS)
    microbatch: float = field(default=0.0, metadata=_SECONDS)
    backward: float = field(default=0.0, metadata=_SECONDS)
    update: float = field(default=0.0, metadata=_SECONDS)
    sync: float = field(default=0.0, metadata=_SECONDS)
    sync_byte: float = field(default=0.0, metadata=_SECONDS)
    token: float = field(default=0.0, metadata=_SECONDS)
    row: float = field(default=0.0, metadata=_SECONDS)
    remote: float = field(default=0.0, metadata=_SECONDS)
    sharded_block: float = field(default=0.0, metadata=_SECONDS)
    sharded_traffic: float = field(default=1.0, metadata=_SECONDS)
    handover: float = field(default=0.0, metadata=_SECONDS)
    overlap: bool = False

    def changed(self, floors: Mapping[str, Any]) -> "EngineFloors":
        """Return these floors with others in their place; a FuseError names an unknown floor or a faulty value."""
        if "name" in floors:
            raise FuseError("floors.name: not a floor; the floors have seconds")
        return read_block(EngineFloors, {**asdict(self), **floors}, "floors") if floors else self


# matmul, attention: calibrated on llm-foundry's training benchmarks of 7B models on eight devices
# (mosaicml/llm-foundry, scripts/train/benchmarking/README.md). bandwidth: calibrated on lmdeploy's static benchmark of
# llama2-7b on one A100 (InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md). network: assumed; Megatron-LM's published
# utilisation with tensor parallel 8 tests it.
A100 = Efficiency(matmul=0.74, attention=0.35, bandwidth=0.80, network=0.75)
HOPPER = Efficiency(matmul=0.60, attention=0.25, bandwidth=0.80, network=0.75)
# Its tensor cores wait for nothing else: cuDNN's attention reaches 0.87 of the peak (Dao-AILab/flash-attention#1310),
# and FlashAttention 2 0.45 to 0.57. matmul: within 0.80 to 0.90, assumed.
H20 = Efficiency(matmul=0.85, attention=0.50, bandwidth=0.80, network=0.75)
# assumed, for every other GPU (B200, GB200, L40S, MI300X, RTX-4090): between the two, links over PCIe.
OTHER_GPU = Efficiency(matmul=0.60, attention=0.30, bandwidth=0.80, network=0.60)
# assumed: `verl-fuse profile` measures a CPU.
CPU = Efficiency(matmul=0.60, attention=0.30, bandwidth=0.60, network=0.50)

# CUDA graphs in decoding, fused kernels in training: an engine and a trainer by themselves, as benchmarks run them.
# decode_step: calibrated on lmdeploy (as above), which schedules a pass after the one before. sequence, handover,
# overlap: vLLM 0.24 on one H100, 1.5B (tests/golden/h100_passes.json): without asynchronous scheduling a sequence adds
# 17 to 18 microseconds to a pass; with it, passes of 1 and 8 take 0.1 to 1 ms more than the host's part, although the
# device's is half of that. An H200's passes were held out (tests/golden/test_h200.py). The rest is assumed: a launch
# takes some 5 microseconds, and a block some 40 of them.
GRAPHS = EngineFloors(
    "graphs",
    block=2e-4,
    decode_block=3e-5,
    collective=2e-5,
    decode_step=2e-3,
    call=0.05,
    sequence=1.8e-5,
    handover=6e-4,
    overlap=True,
)
# What verl adds on two cores to a call, a sequence of it, a micro-batch, a backward pass and an update: GRPO steps of
# 64 samples, from trials with 1 and with 32 micro-batches (`python -m ci.bench.tune --case grpo-padded`); how much of
# a call's 0.22 s is that of its sequences, from steps of 64 and of 128 (`python -m ci.bench.predicted`), whose median
# error is the least with 1.5 to 2.5 ms, and from those of tests/golden/cpu_runs.json (up to 2.1 ms).
CPU_FLOORS = replace(GRAPHS, name="cpu", call=0.105, row=0.0018, microbatch=0.024, backward=0.04, update=0.027)
# The same inside a framework for reinforcement learning, of 2025: what it adds to every pass, call and step. The
# intervals of the constants fitted to published steps are those in which the median error of the eight rows of
# `python -m ci.bench.published` stays below 17 %.
FRAMEWORK = replace(
    GRAPHS,
    name="framework",
    # Scheduling, sampling and log-probs of the sampled tokens, detokenisation and the server, one after the other with
    # the device: 62 % of vLLM's time for Llama 3 8B on an H100 before its release 0.6.0 (vLLM's performance update of
    # September 2024), whose passes take some 5 ms there (vLLM's blog on V1). Fitted within 2 to 7 ms a pass and 20 to
    # 70 microseconds a sequence; intervals 2.5 to 10 ms, and 12 to 140 microseconds.
    decode_step=5e-3,
    sequence=5e-5,
    overlap=False,
    # Transformers' models launch one operator after the other. Traffic: calibrated on an H100's training and log-probs
    # of 1.5B (tests/golden/h100_passes.json), 1.9 to 2.6. Block: EAGER's 0.26 to 1.2 ms a block, see below.
    sharded_block=1e-3,
    sharded_traffic=2.0,
    # Waking the rollout, putting the trainer to sleep, gathering and loading: 4 to 8 s for 8B (NVIDIA-NeMo/RL#959) and
    # 7 s for 30B-A3B on eight H100 (slime's blog on weight sync, from 60 s before its optimisation). Interval of
    # `sync`: 1 to 12 s.
    sync=3.0,
    sync_byte=1 / 20e9,
    # Rewards, advantages, padding, and copies to and from workers: 1.2 s for the advantages of 2.2 million tokens
    # (verl-project/verl#1208). Interval: 0.2 to 2 microseconds a call.
    token=5e-7,
    # Small messages of NCCL between two nodes take 40 to 60 microseconds, those of tensor ranks in a node 20.
    remote=4e-5,
)
# The same with the engine of verl 0.9.1, vLLM 0.24: it schedules a pass while another computes, and texts and answers
# are made in other processes meanwhile. Held out: the generation of GRPO steps of 1.5B on one H200
# (tests/golden/test_h200.py).
VERL = replace(FRAMEWORK, name="verl", decode_step=GRAPHS.decode_step, sequence=GRAPHS.sequence, overlap=True)
# A kernel launch per operator everywhere, as ReaL's engine of early 2024 ran. decode_block + 2 collectives, and
# traffic: calibrated on the three bars "actor 8" of ReaL's main figure. How the first splits cannot be told from
# them and is assumed; eager decoding of 7B models elsewhere takes 0.26 ms (H100) to 1.2 ms (A100, gpt-fast's
# starting point) per block.
EAGER = EngineFloors("eager", block=8e-4, decode_block=8e-4, collective=2e-4, decode_step=1e-3, call=0.05, traffic=3.0)

# The A100 with less memory, and the Hoppers with other links or memory, are taken to be as efficient as the measured
# devices.
_EFFICIENCIES = {
    **dict.fromkeys(("A100-40G", "A100-80G"), A100),
    **dict.fromkeys(("H100", "H200", "GH200", "H800"), HOPPER),
    "H20": H20,
}


def efficiency_of(device: Device) -> Efficiency:
    """Return the efficiencies of a device by its name; a name starting with CPU is a CPU, an unknown name some GPU."""
    return CPU if device.is_cpu else _EFFICIENCIES.get(device.name, OTHER_GPU)


def floors_of(device: Device) -> EngineFloors:
    """Return the floors of a step on such devices: verl's on accelerators. A CPU's are recorded, not assumed."""
    return GRAPHS if device.is_cpu else VERL
