"""The invariants in the docstring of ci/gpu/pack.py."""

import hashlib
import importlib.metadata
import struct
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from ci.gpu import pack
from ci.gpu.pieces import find

CODE = 200
MAGIC = struct.pack("<I", 0xBA55ED50)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, which is all that pip knows."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    with zipfile.ZipFile(folder / "tiny_thing-1.0-py3-none-any.whl", "w") as wheel:
        for name, text in {
            "tiny_thing/__init__.py": "ANSWER = 42\n",
            "tiny_thing/unused/big.txt": "x" * 1000,
            "tiny_thing-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: tiny-thing\nVersion: 1.0\n",
            "tiny_thing-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "tiny_thing-1.0.dist-info/RECORD": "",
        }.items():
            wheel.writestr(name, text)
        wheel.writestr("tiny_thing/lib.so", elf(fat(machine(90, b"a"), machine(80, b"b"))))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def lock(wheels: Path, tmp_path: Path) -> Path:
    path = tmp_path / "wheels.lock"
    (wheel,) = wheels.iterdir()
    path.write_text(f"# text\ntiny-thing==1.0 --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return path


def entry(kind: int, chip: int, code: bytes) -> bytes:
    head = struct.pack("<HHIQ", kind, 0x101, 64, len(code)) + bytes(12) + struct.pack("<I", chip)
    return head.ljust(64, b"\x07") + code


def machine(chip: int, letter: bytes) -> bytes:
    return entry(2, chip, letter * CODE)


def fat(*entries: bytes) -> bytes:
    return MAGIC + struct.pack("<HHQ", 1, 16, sum(map(len, entries))) + b"".join(entries)


def elf(*parts: bytes) -> bytes:
    return b"\x7fELF" + b"text of the host".join([b"", *parts, b""])


def test_machine_code_of_one_chip_is_kept_and_the_rest_of_a_library_is_not_touched(tmp_path: Path):
    library = tmp_path / "lib.so"
    kept, other, text = machine(90, b"k"), machine(80, b"o"), entry(1, 90, b"t" * CODE)
    # The magic alone, in the host's code, is no fat binary; nor is one whose entries do not fill it.
    lookalikes = [MAGIC + b"y" * 80, MAGIC + struct.pack("<HHQ", 1, 16, 64 + CODE - 4) + machine(80, b"z")]
    library.write_bytes(elf(fat(kept, other, text), *lookalikes, fat(other, kept), MAGIC))
    assert pack.thin(library, 90) == (2 * CODE, 3 * CODE)
    zeroed = [each.replace(letter * CODE, bytes(CODE)) for each, letter in ((other, b"o"), (text, b"t"))]
    wanted = elf(fat(kept, *zeroed), *lookalikes, fat(zeroed[0], kept), MAGIC)
    assert library.read_bytes() == wanted
    assert pack.thin(library, 80) == (2 * CODE, 3 * CODE)
    assert b"k" * CODE not in library.read_bytes()


def test_only_libraries_are_thinned(tmp_path: Path):
    for name, content in {"a.so": elf(), "b.so": b"text", "c.py": elf(), "empty.so": b""}.items():
        (tmp_path / name).write_bytes(content)
    assert [path.name for path in pack.libraries(tmp_path)] == ["a.so"]


def test_a_line_without_a_sum_is_refused(lock: Path):
    lines = lock.read_text()
    assert pack.read_lock(lock) == [lines.splitlines()[1]]
    for wrong in ("other==2.0", "other==2.0 --hash=md5:0", "other>=2.0 --hash=sha256:" + "0" * 64):
        lock.write_text(lines + "\n" + wrong + "\n")
        with pytest.raises(ValueError, match=r"wheels\.lock, line 4: 'other.*: needs name==version"):
            pack.unpack(lock, lock.parent / "site")
    assert not (lock.parent / "site").exists()


def test_a_file_with_another_sum_is_refused(lock: Path, wheels: Path, capfd):
    (wheel,) = wheels.iterdir()
    with zipfile.ZipFile(wheel, "a") as content:
        content.writestr("tiny_thing/more.py", "")
    with pytest.raises(ValueError, match="pip ended with 1"):
        pack.unpack(lock, lock.parent / "site")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert not (lock.parent / "site" / "tiny_thing").exists()


def test_the_sums_of_a_lock_are_written(lock: Path):
    right = lock.read_text()
    lock.write_text("# text\ntiny-thing==1.0\n")
    assert pack.write_lock(lock) == 1
    assert lock.read_text() == right


def test_the_lock_of_the_repository_is_whole():
    names = {line.split("==")[0] for line in pack.read_lock(pack.LOCK)}
    # xgrammar, and so vLLM, imports the last one and does not say so in its requirements for this platform.
    assert names >= {"vllm", "verl", "ray", "transferqueue", "tensordict", "xgrammar", "apache-tvm-ffi"}
    # The machine's own, for its CUDA.
    assert not names & {"torch", "triton", "numpy"}


def test_a_name_that_is_not_there_is_refused(tmp_path: Path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b.txt").write_text("")
    (tmp_path / "c").write_text("")
    for dropped, stripped in ((["a", "gone"], []), (["b.*"], ["gone"])):
        with pytest.raises(ValueError, match="gone is not in these packages"):
            pack.prune(tmp_path, dropped, stripped)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]


def test_metadata_names_every_entry_point_and_the_module_of_the_stand_in(tmp_path: Path):
    pack.add_ours(tmp_path)
    found = {each.metadata["Name"]: each for each in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert set(found) == {"flash-attn", "verl-fuse"}
    assert (found["flash-attn"].read_text("top_level.txt") or "").split() == ["flash_attn"]
    assert (tmp_path / "flash_attn" / "bert_padding.py").exists()
    project = tomllib.loads((pack.ROOT / "pyproject.toml").read_text())["project"]
    wanted = {
        (group, name, value)
        for group, points in {**project["entry-points"], "console_scripts": project["scripts"]}.items()
        for name, value in points.items()
    }
    assert {(each.group, each.name, each.value) for each in found["verl-fuse"].entry_points} == wanted
    assert len(found["verl-fuse"].requires or []) == len(project["dependencies"])


def test_a_pack_is_what_the_lock_names_without_what_is_dropped(lock: Path, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(pack, "LOCK", lock)
    monkeypatch.setattr(pack, "DROPPED", ("tiny_thing/unused",))
    monkeypatch.setattr(pack, "STRIPPED", ())
    assert pack.main(["--into", str(tmp_path / "pieces")]) == 0
    assert "tiny_thing/lib.so: 0.0 MiB of code kept" in capsys.readouterr().out
    with tarfile.open(*find([tmp_path / "pieces"])) as packed:
        packed.extractall(tmp_path / "site", filter="data")
    assert {path.name for path in (tmp_path / "site" / "tiny_thing").iterdir()} == {"__init__.py", "lib.so"}
    library = (tmp_path / "site" / "tiny_thing" / "lib.so").read_bytes()
    assert b"a" * CODE in library
    assert b"b" not in library
    assert {path.name for path in (tmp_path / "site").glob("*.dist-info")} > {"tiny_thing-1.0.dist-info"}


def test_a_library_without_code_for_the_chip_is_refused(lock: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(pack, "DROPPED", ())
    monkeypatch.setattr(pack, "STRIPPED", ())
    with pytest.raises(ValueError, match=r"tiny_thing/lib\.so: no code for chip 100"):
        pack.pack(lock, tmp_path / "pieces", 100)


def test_a_failure_is_an_exit_code(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr(pack, "LOCK", tmp_path / "absent.lock")
    assert pack.main(["--into", str(tmp_path / "pieces")]) == pack.FAILED
    assert "absent.lock" in capsys.readouterr().err
    with pytest.raises(OSError, match="tar ended with"):
        pack.compress(tmp_path / "gone", tmp_path / "archive")
