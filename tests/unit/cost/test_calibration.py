"""Every built-in device has efficiencies, and they are fractions."""

import dataclasses

import pytest

from verl_fuse.cost.calibration import CPU, FLOORS_BY_ENGINE, HOPPER, OTHER_GPU, efficiency_of
from verl_fuse.spec.cluster import DEVICES, Device


@pytest.mark.parametrize("device", DEVICES.values(), ids=lambda device: device.name)
def test_efficiencies_are_fractions(device: Device):
    assert all(0 < value < 1 for value in dataclasses.astuple(efficiency_of(device)))


def test_devices_go_by_their_names():
    assert efficiency_of(DEVICES["H200"]) is HOPPER
    assert efficiency_of(dataclasses.replace(DEVICES["H200"], name="ACME")) is OTHER_GPU
    assert efficiency_of(dataclasses.replace(DEVICES["CPU"], name="cpu of mine")) is CPU


def test_floors_are_not_negative():
    assert all(
        getattr(engine, f.name) >= 0 for engine in FLOORS_BY_ENGINE.values() for f in dataclasses.fields(engine)[1:]
    )
