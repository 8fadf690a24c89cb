"""Fixtures. Helpers that other processes import as well are in ``helpers``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import Source

from torchcache import filesystem

# The S3 server is the benchmarks' too. At the end, because names such as ``data`` are there.
sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))


@pytest.fixture(autouse=True)
def no_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container whose temporary folder is a layer, every test would be warned of it."""
    risk = filesystem.risk(tmp_path)
    if risk is not None and risk.fills:
        monkeypatch.setattr(filesystem, "_MOUNTS", tmp_path / "no such file")


@pytest.fixture
def cache_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for stores, in the place where a user's would be."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Source:
    """200 samples of (image, label), whose reads are counted over all processes."""
    return Source(200, tmp_path / "reads")
