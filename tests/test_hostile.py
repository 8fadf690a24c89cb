"""Damaged and hostile stores: an error of ours, or samples, but never a signal, and nothing executes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hostile
import lmdb
import pytest

from torchcache import CachedDataset, StoreUnavailableError, buffer, catalog


def originals(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A complete store and an incomplete one, of several blocks each, and the log of their source's reads."""
    monkeypatch.setattr(buffer, "ENOUGH_SAMPLES", 7)
    source = hostile.source(folder / "reads")
    paths = []
    for name, count in (("complete", hostile.LENGTH), ("partial", 40)):
        with CachedDataset(source, cache_dir=folder, name=name, key="k") as cached:
            for i in range(count):
                cached[i]
            paths.append(str(cached.path))
    return [*paths, str(folder / "reads")]


def read_hostile(arguments: list[str], first: int, last: int) -> Counter[str]:
    """What became of the stores of these seeds."""
    program = [sys.executable, hostile.__file__, *arguments, str(first), str(last)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return Counter(json.loads(done.stdout))


def test_hostile_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = read_hostile(originals(tmp_path, monkeypatch), 0, 300)
    assert outcomes["CorruptStoreError"] > 20
    assert outcomes["gone on"] > 100


def test_a_store_that_promises_more_samples_than_memory_has_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither opening it without its dataset nor verifying it takes memory by what it says."""
    partial = Path(originals(tmp_path, monkeypatch)[1])
    with lmdb.open(str(partial), max_dbs=8, lock=False) as env:
        meta = env.open_db(b"meta")
        with env.begin(write=True) as txn:
            identity = json.loads(txn.get(b"identity", db=meta))
            txn.put(b"identity", json.dumps({**identity, "length": 1 << 50}).encode(), db=meta)
    with pytest.raises(StoreUnavailableError, match=rf"holds 40 of {1 << 50} samples"):
        CachedDataset.open(partial)
    assert catalog.verify(partial).samples == 40
