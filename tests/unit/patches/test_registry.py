"""The invariants in the docstring of verl_fuse_patches/registry.py."""

import importlib
import sys

import pytest

from verl_fuse.errors import FuseError
from verl_fuse.spec.contract import Code
from verl_fuse_patches import registry
from verl_fuse_patches.registry import (
    PatchStatus,
    check_source,
    check_version,
    contracts,
    install,
    load,
    settle,
    status,
)

TARGET = "acme_lib.greeting:greet"


def greet() -> str:
    return importlib.import_module("acme_lib.greeting").greet()


def test_installing_imports_nothing_and_patches_at_the_first_import(acme, make_patch):
    patch = make_patch()
    assert status([patch]) == [PatchStatus("greeting", TARGET, "off")]
    install([patch])
    assert "acme_lib" not in sys.modules
    assert status([patch]) == [PatchStatus("greeting", TARGET, "pending")]
    assert greet() == "patched upstream"
    assert status([patch]) == [PatchStatus("greeting", TARGET, "applied")]


def test_a_module_that_is_already_imported_is_patched_at_once(acme, make_patch):
    assert greet() == "upstream"
    install([make_patch()])
    assert greet() == "patched upstream"


def test_installing_twice_patches_once(acme, make_patch):
    install([make_patch()])
    install([make_patch()])
    assert greet() == "patched upstream"
    install([make_patch()])
    assert greet() == "patched upstream"


def test_changed_source_is_refused_at_every_import(acme, make_patch):
    acme.write_text("def greet():\n    return 'newer'\n")
    patch = make_patch()
    install([patch])
    with pytest.raises(FuseError) as caught:
        greet()
    message = str(caught.value)
    assert message == (
        f"patch 'greeting' of {TARGET} is refused: expected fingerprint {check_version(patch)}, found 84b5a952fef70d7d "
        "in version "
        "1.2.0. Install acme-lib >=1.2,<1.3, or a verl-fuse that supports this version. "
        "Why it is patched: https://example.org/issues/7"
    )
    assert status([patch]) == [PatchStatus("greeting", TARGET, "refused", message)]
    with pytest.raises(FuseError, match="found 84b5a952fef70d7d"):
        greet()  # importing again does not slip past the refusal


def test_each_version_has_a_fingerprint_of_its_own(acme, make_patch):
    read = make_patch().fingerprints[">=1.2,<1.3"]
    patch = make_patch(fingerprints={">=1.0,<1.2": "0123456789abcdef", ">=1.2,<1.3": read})
    install([patch])
    assert greet() == "patched upstream"
    other = make_patch(fingerprints={">=1.0,<1.2": read, ">=1.2,<1.3": "0123456789abcdef"})
    with pytest.raises(FuseError, match="expected fingerprint 0123456789abcdef, found"):
        check_source(other)


def test_a_target_that_is_gone_is_refused(acme, make_patch):
    acme.write_text("def hello():\n    return 'newer'\n")
    install([make_patch()])
    with pytest.raises(
        FuseError, match=r"patch 'greeting' .* is refused: acme_lib.greeting has no greet in version 1.2.0"
    ):
        greet()


def test_another_version_is_refused_before_anything_is_imported(acme, make_patch):
    patch = make_patch(fingerprints={">=1.3,<1.4": "0123456789abcdef", ">=1.6": "0123456789abcdef"})
    with pytest.raises(
        FuseError,
        match=r"written for versions >=1.3,<1.4 or >=1.6; found 1.2.0\. Install acme-lib >=1.3,<1.4 or >=1.6, or",
    ):
        install([patch])
    assert [found.state for found in status([patch])] == ["refused"]
    assert greet() == "upstream"


@pytest.mark.parametrize("change", [{"needed": lambda version: False}, {"distributions": ("acme-absent",)}])
def test_a_patch_that_is_not_needed_is_left_alone(acme, make_patch, change):
    patch = make_patch(**change)
    install([patch])
    assert status([patch]) == [PatchStatus("greeting", TARGET, "not needed")]
    assert greet() == "upstream"


def test_the_first_distribution_found_counts(acme, make_patch):
    install([make_patch(distributions=("acme-absent", "acme-lib"))])
    assert greet() == "patched upstream"


def test_a_patch_may_act_before_its_target_is_imported(acme, make_patch):
    seen = []
    install([make_patch(after="json", apply=seen.append)])
    assert seen == [sys.modules["json"]]
    assert "acme_lib" not in sys.modules


def test_settling_applies_or_refuses_what_is_pending(acme, make_patch, monkeypatch):
    monkeypatch.setattr(registry, "NAMES", ())
    patch = make_patch()
    install([patch])
    assert settle() == []
    assert [found.state for found in status([patch])] == ["applied"]


def test_settling_leaves_a_refused_patch_refused(acme, make_patch, monkeypatch):
    monkeypatch.setattr(registry, "NAMES", ())
    patch = make_patch()
    install([patch])
    acme.write_text("def greet(): ...\n")
    settle()
    assert [found.state for found in status([patch])] == ["refused"]


def test_patches_rest_on_what_they_replace_and_watch(acme, make_patch, monkeypatch):
    patches = {
        "one": make_patch(watched=(("acme_lib:helper", "0123456789abcdef"),)),
        "two": make_patch(needed=lambda version: False),
    }
    monkeypatch.setattr(registry, "NAMES", tuple(patches))
    monkeypatch.setattr(registry, "load", patches.get)
    assert contracts() == (
        Code(TARGET, tuple(patches["one"].fingerprints.values()), "greeting"),
        Code("acme_lib:helper", "0123456789abcdef", "greeting"),
    )


def test_an_unknown_name_is_refused_with_the_choices():
    with pytest.raises(FuseError, match="no patch 'gloo'; there are: critic_attention, flat_offload"):
        load("gloo")
