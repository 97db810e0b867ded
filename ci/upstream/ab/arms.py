"""Lists the arms that are compared with stock verl, each with the differences from stock verl that it may have."""

from dataclasses import dataclass

from ci.upstream.ab.compare import Bands, Expected, Tolerance

# Streaming splits batches differently: padding inside micro-batches, and with it the order of float32 sums,
# differs. Nothing else may.
STREAMING = Tolerance(first_step=1e-5, later=1e-4, metric_relative=1e-4, metric_absolute=1e-5)
# Time is measured on machines with other work; memory is not as noisy.
SAME_WORK = Bands(replayed=1.3, live=1.5, memory=1.1)
# Where the cores are never idle, streaming moves work and may lose (plugins/verl_fuse_interstage/README.md).
MOVED_WORK = Bands(replayed=1.5, live=1.5, memory=1.1)


@dataclass(frozen=True)
class Arm:
    """One way to run: as stock verl or in trainer mode `fuse`, with these overrides; and the equality expected of the
    run."""

    stock: bool
    overrides: tuple[str, ...]
    expected: Expected


ARMS = {
    # verl-fuse is installed, not switched on.
    "off": Arm(True, (), Expected(None, None, SAME_WORK)),
    "observe": Arm(False, (), Expected("fuse/step_seconds", None, SAME_WORK)),
    "streaming": Arm(
        False, ("fuse.interstage.enabled=true",), Expected("fuse/streamed_samples", STREAMING, MOVED_WORK)
    ),
}
