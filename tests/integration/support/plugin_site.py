"""Plugins for runs in processes of their own."""

from pathlib import Path


def install_plugin(site: Path, name: str, source: str) -> None:
    """Write a plugin of one module in pip's form into the folder `site`, which is to be on PYTHONPATH."""
    metadata = site / f"{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / f"{name}.py").write_text(source)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[verl_fuse]\n{name} = {name}\n")
