"""Lists efficiencies of devices and floors of engines, each with its source. README.md names the fitted numbers, the
runs that they were fitted to, and the errors.

`calibrated on …`: chosen so that the analytic model meets these published measurements. `assumed`: a guess that nothing
published here tests.
"""

from dataclasses import dataclass

from verl_fuse.spec.cluster import Device


@dataclass(frozen=True)
class Efficiency:
    """The fractions of its peak figures that a device reaches: matrix products, attention, memory, links between
    devices."""

    matmul: float
    attention: float
    bandwidth: float
    network: float


@dataclass(frozen=True)
class EngineFloors:
    """Seconds that the software adds.

    The least one block takes in a forward (`block`) and in a decode step (`decode_block`); one collective between
    tensor ranks; one decode step, and each sequence running in it; one request; one inference or training call, each of
    its micro-batches, and each optimizer step; handing new weights to the rollout.
    `traffic` multiplies memory traffic outside matrix products: one is fused kernels.
    """

    name: str
    block: float
    decode_block: float
    collective: float
    decode_step: float
    call: float
    traffic: float = 1.0
    sequence: float = 0.0
    request: float = 0.0
    microbatch: float = 0.0
    update: float = 0.0
    sync: float = 0.0


# matmul, attention: calibrated on llm-foundry's training benchmarks of 7B models on eight devices
# (mosaicml/llm-foundry, scripts/train/benchmarking/README.md). bandwidth: calibrated on lmdeploy's static benchmark of
# llama2-7b on one A100 (InternLM/lmdeploy, docs/en/benchmark/a100_fp16.md). network: assumed; Megatron-LM's published
# utilisation with tensor parallel 8 tests it.
A100 = Efficiency(matmul=0.74, attention=0.35, bandwidth=0.80, network=0.75)
HOPPER = Efficiency(matmul=0.60, attention=0.25, bandwidth=0.80, network=0.75)
# assumed, for every other GPU (B200, GB200, L40S, MI300X, RTX-4090): between the two, links over PCIe.
OTHER_GPU = Efficiency(matmul=0.60, attention=0.30, bandwidth=0.80, network=0.60)
# assumed: `verl-fuse profile` measures a CPU.
CPU = Efficiency(matmul=0.60, attention=0.30, bandwidth=0.60, network=0.50)

# CUDA graphs in decoding, fused kernels in training: vLLM or SGLang with FSDP or Megatron. decode_step: calibrated on
# lmdeploy (as above), the rest assumed: a launch takes some 5 microseconds, and a block some 40 of them.
GRAPHS = EngineFloors("graphs", block=2e-4, decode_block=3e-5, collective=2e-5, decode_step=2e-3, call=0.05)
# A kernel launch per operator everywhere, as ReaL's engine of early 2024 ran. decode_block + 2 collectives, and
# traffic: calibrated on the three bars "actor 8" of ReaL's main figure. How the first splits cannot be told from
# them and is assumed; eager decoding of 7B models elsewhere takes 0.26 ms (H100) to 1.2 ms (A100, gpt-fast's
# starting point) per block.
EAGER = EngineFloors("eager", block=8e-4, decode_block=8e-4, collective=2e-4, decode_step=1e-3, call=0.05, traffic=3.0)

FLOORS_BY_ENGINE = {engine.name: engine for engine in (GRAPHS, EAGER)}

# The A100 with less memory, and the Hoppers with other links or fewer processors, are taken to be as efficient as the
# measured devices.
_EFFICIENCIES = {"A100-40G": A100, "A100-80G": A100, **dict.fromkeys(("H100", "H200", "H800", "H20"), HOPPER)}


def efficiency_of(device: Device) -> Efficiency:
    """Return the efficiencies of a device by its name; a name starting with CPU is a CPU, an unknown name some GPU."""
    return CPU if device.is_cpu else _EFFICIENCIES.get(device.name, OTHER_GPU)
