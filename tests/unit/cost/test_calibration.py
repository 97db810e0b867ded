"""Every built-in device has efficiencies, and they are fractions."""

import dataclasses
import re

import pytest

from verl_fuse.cost.calibration import (
    CPU,
    EAGER,
    FRAMEWORK,
    GRAPHS,
    HOPPER,
    OTHER_GPU,
    VERL,
    efficiency_of,
    floors_of,
)  # fmt: skip
from verl_fuse.errors import FuseError
from verl_fuse.spec.cluster import DEVICES, Device


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_efficiencies_are_fractions(device: Device):
    assert all(0 < value < 1 for value in dataclasses.astuple(efficiency_of(device)))


def test_devices_go_by_their_names():
    assert efficiency_of(DEVICES["H200"]) is HOPPER
    assert efficiency_of(dataclasses.replace(DEVICES["H200"], name="ACME")) is OTHER_GPU
    assert efficiency_of(dataclasses.replace(DEVICES["CPU"], name="cpu of mine")) is CPU


def test_floors_are_changed_by_name():
    assert FRAMEWORK.changed({"sequence": 2e-5}) == dataclasses.replace(FRAMEWORK, sequence=2e-5)
    assert FRAMEWORK.changed({}) is FRAMEWORK
    for floors, told in (
        ({"sequences": 1.0}, "did you mean 'sequence'"),
        ({"sync": -1.0}, "floors.sync=-1.0: needs >= 0"),
    ):
        with pytest.raises(FuseError, match=re.escape(told)):
            FRAMEWORK.changed(floors)
    with pytest.raises(FuseError, match=r"floors\.name"):
        FRAMEWORK.changed({"name": "mine"})


def test_accelerators_have_verl_s_floors_and_cpus_recorded_ones():
    assert floors_of(DEVICES["H20"]) is VERL
    decoding = {name: getattr(FRAMEWORK, name) for name in ("decode_step", "sequence", "overlap")}
    assert dataclasses.replace(VERL, name="framework", **decoding) == FRAMEWORK, "all but the engine is a framework's"
    assert floors_of(DEVICES["CPU"]) is GRAPHS


def test_floors_are_not_negative():
    assert all(
        getattr(engine, f.name) >= 0
        for engine in (GRAPHS, FRAMEWORK, VERL, EAGER)
        for f in dataclasses.fields(engine)[1:]
    )
