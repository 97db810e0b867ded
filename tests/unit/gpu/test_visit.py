"""The invariants in the docstring of ci/gpu/visit.py, with parts that take no time."""

import json
import os
import random
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from ci.gpu import visit
from ci.gpu.pack import compress
from ci.gpu.pieces import cut

WAIT = 60.0


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    """Pieces with packages of one line each, in two folders."""
    site = tmp_path / "packed"
    for name in visit.NEEDED:
        (site / name).mkdir(parents=True)
        (site / name / "__init__.py").write_text(f"NAME = {name!r}\n")
    (site / "vllm" / "old.py").write_text("print 'for another Python'\n")
    (site / "run").write_text("#!/bin/sh\n")
    (site / "run").chmod(0o755)
    # Random numbers do not compress: the pieces are several.
    (site / "numbers").write_bytes(random.Random(0).randbytes(5000))
    return packed(site, tmp_path / "pieces")


def packed(site: Path, into: Path) -> Path:
    compress(site, site.with_suffix(".tar.xz"))
    assert len(cut(site.with_suffix(".tar.xz"), into, 2000)) > 1
    return into


def stepwise(**codes: int) -> dict[str, list[str]]:
    """Return parts that note their begin and end in the file order, and end with their code; `whole` waits as the real
    one does."""
    program = (
        "import os, pathlib, sys, time\n"
        "name, code = sys.argv[1], int(sys.argv[2])\n"
        "note = lambda what: open('../order', 'a').write(f'{what} {name}\\n')\n"
        "note('begin')\n"
        "while name == 'whole' and not pathlib.Path('../begin').exists(): time.sleep(0.01)\n"
        "if name == 'engine': time.sleep(0.5)\n"
        "note('end')\n"
        "print('table of', name)\n"
        "print(os.environ['PYTHONPATH'])\n"
        "sys.exit(code)\n"
    )
    return {name: [sys.executable, "-c", program, name, str(codes.get(name, 0))] for name in visit.PARTS}


def finish(folder: Path, parts: dict[str, list[str]]) -> list[str]:
    assert visit.start(folder, folder / "out", parts).wait(WAIT) == 0
    assert (folder / "out" / "ended").exists()
    return (folder / "out" / "order").read_text().splitlines()


def test_only_pythons_own_library_is_needed_before_unpacking(pieces: Path, tmp_path: Path):
    command = [sys.executable, "-S", "-m", "ci.gpu.visit", "unpack", str(pieces), "--into", str(tmp_path / "w")]
    done = subprocess.run(command, cwd=visit.ROOT, capture_output=True, text=True, check=False, env={"PATH": ""})
    assert done.returncode == 0, done.stderr
    assert "torch, transformers, vllm can be imported" in done.stdout
    site = tmp_path / "w" / "site"
    assert (site / "numbers").read_bytes() == (tmp_path / "packed" / "numbers").read_bytes()
    assert os.access(site / "run", os.X_OK)
    assert list((site / "torch" / "__pycache__").iterdir())


def test_a_damaged_piece_leaves_no_site(pieces: Path, tmp_path: Path, capsys):
    piece = pieces / "piece-01"
    *others, last = piece.read_bytes()
    piece.write_bytes(bytes([*others, last ^ 1]))
    assert visit.main(["unpack", str(pieces), "--into", str(tmp_path / "w")]) == visit.FAILED
    assert "piece-01 is damaged" in capsys.readouterr().err
    assert not (tmp_path / "w").exists()


def test_a_package_that_cannot_be_imported_is_told_with_its_error(pieces: Path, tmp_path: Path, capsys):
    (tmp_path / "packed" / "vllm" / "__init__.py").write_text("import torch\nraise RuntimeError(torch.NAME)\n")
    packed(tmp_path / "packed", pieces)
    assert visit.main(["unpack", str(pieces), "--into", str(tmp_path / "w")]) == visit.FAILED
    told = capsys.readouterr().err
    assert "vllm cannot be imported" in told
    assert "RuntimeError: torch" in told
    assert "transformers cannot" not in told


@pytest.mark.parametrize("code", [0, 3])
def test_whole_steps_begin_when_the_engines_have_ended(tmp_path: Path, code: int):
    order = finish(tmp_path, stepwise(engine=code))
    assert max(order.index(f"end {name}") for name in ("attention", "model")) < order.index("begin engine")
    assert set(order[4:6]) == {"begin engine", "begin whole"}
    assert order[6:] == ["end engine", "end whole"]
    stamps = [line.split()[1:] for line in (tmp_path / "out" / "stamps").read_text().splitlines()]
    assert stamps == [["model", "0"], ["attention", "0"], ["engine", str(code)], ["whole", "0"]]


def test_nothing_runs_without_a_model(tmp_path: Path):
    order = finish(tmp_path, stepwise(model=1))
    assert set(order) == {f"{what} {name}" for what in ("begin", "end") for name in ("attention", "model")}
    assert "model 1" in (tmp_path / "out" / "stamps").read_text()


def test_start_returns_while_its_parts_run_and_refuses_a_second_start(tmp_path: Path, capsys):
    parts = stepwise()
    parts["model"] = [sys.executable, "-c", "import os, time; print(os.getsid(0), flush=True); time.sleep(2)"]
    begun = time.monotonic()
    process = visit.start(tmp_path, tmp_path / "out", parts)
    assert visit.look(tmp_path / "out", tmp_path).splitlines()[0] == "parts are running"
    assert time.monotonic() < begun + 2
    assert visit.main(["start", str(tmp_path)]) == visit.FAILED
    assert "parts were started there" in capsys.readouterr().err
    assert visit.main(["look", str(tmp_path), "--seconds", str(WAIT)]) == 0
    told = capsys.readouterr().out
    assert "all parts have ended" in told
    assert process.wait(WAIT) == 0
    session = (tmp_path / "out" / "model.log").read_text().strip()
    assert session.isdigit()
    assert int(session) != os.getsid(0)


def test_what_is_looked_at_and_packed(tmp_path: Path):
    finish(tmp_path, stepwise())
    out = tmp_path / "out"
    for name in ("model/model.safetensors", "model/config.json", "fast/run.log", "history.history/a", "whole.json"):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("".join(f"{name} {number}\n" for number in range(100)))
    told = visit.look(out, tmp_path / "back")
    lines = told.splitlines()
    assert lines[:1] == ["0 model 0"]
    # The end of a run's log, and the tables below.
    assert "fast/run.log 99" in lines
    assert "fast/run.log 80" not in lines
    assert [line.split()[-1] for line in lines if line.startswith("table of")] == list(visit.PARTS)
    paths = (tmp_path / "site", out / "repo", out / "repo/plugins", out / "repo/patches")
    assert (out / "whole.log").read_text().splitlines()[1] == os.pathsep.join(map(str, paths))
    with tarfile.open(tmp_path / "back" / "out.tar.gz") as packed:
        names = set(packed.getnames())
    assert names >= {"out/fast/run.log", "out/whole.json", "out/stamps", "out/whole.log", "out/model/config.json"}
    assert not [name for name in names if "repo" in name or "safetensors" in name or "history" in name]


def test_the_parts_are_commands_of_the_kit(tmp_path: Path):
    parts = visit.parts_of(tmp_path / "out", "cuda", ["--arms", "stock"], ["--steps", "4"])
    assert tuple(parts) == visit.PARTS
    assert parts["engine"][-2:] == ["--arms", "stock"]
    assert parts["whole"][-2:] == ["--steps", "4"]
    # Every argument is known, and the last one is refused.
    runs = {
        name: subprocess.Popen([*command, "--no-such"], cwd=visit.ROOT, stderr=subprocess.PIPE, text=True)
        for name, command in parts.items()
    }
    for name, run in runs.items():
        told = run.communicate()[1]
        assert told.endswith("error: unrecognized arguments: --no-such\n"), (name, told)


def test_the_working_tree_is_copied(tmp_path: Path):
    finish(tmp_path, stepwise())
    repo = tmp_path / "out" / "repo"
    assert json.loads((tmp_path / "out" / "parts.json").read_text()).keys() == set(visit.PARTS)
    assert (repo / "ci" / "gpu" / "visit.py").read_text() == Path(visit.__file__).read_text()
    assert {path.name for path in repo.iterdir()} == set(visit.TREE)
