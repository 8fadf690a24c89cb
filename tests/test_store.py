"""Stores on disk: foreign, old, damaged, read-only, full. The job goes on, and nothing wrong is served."""

from __future__ import annotations

import gc
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import lmdb
import pytest
import torch
from helpers import Source, as_root, assert_same, image_and_label, mounted
from torch.utils.data import DataLoader

from torchcache import CacheBypassWarning, CachedDataset, buffer, database, errors, reader
from torchcache import store as stores
from torchcache.records import Counters, Identity
from torchcache.store import Store

LENGTH = 200


def filled(source: Any, **options: Any) -> CachedDataset:
    cached = CachedDataset(source, **options)
    cached.fill(progress=False)
    cached.close()
    return cached


def check(cached: CachedDataset) -> None:
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
    assert_same([y for _, y in DataLoader(cached, batch_size=50)], [torch.arange(50) % 10 for _ in range(LENGTH // 50)])


@pytest.mark.parametrize("content", [b"something else", b"\0" * 10_000, os.urandom(8192)])
def test_a_file_of_something_else(cache_dir: Path, source: Source, content: bytes) -> None:
    cached = filled(source)
    shutil.rmtree(cached.path)
    cached.path.mkdir()
    (cached.path / "data.mdb").write_bytes(content)
    for make in (CachedDataset, lambda ds: CachedDataset.open(cached.path)):
        with pytest.raises(errors.NotAStoreError, match=r"data.mdb is not an LMDB file.*another folder"):
            make(source)
    assert (cached.path / "data.mdb").read_bytes() == content


def test_somebody_elses_lmdb(cache_dir: Path, source: Source) -> None:
    cached = filled(source)
    shutil.rmtree(cached.path)
    with lmdb.open(str(cached.path)) as env, env.begin(write=True) as txn:
        txn.put(b"x", b"y")
    for make in (CachedDataset, lambda ds: CachedDataset.open(cached.path)):
        with pytest.raises(errors.NotAStoreError, match="torchcache did not write"):
            make(source)
    with lmdb.open(str(cached.path)) as env, env.begin() as txn:
        assert list(txn.cursor()) == [(b"x", b"y")]


def test_a_folder_of_something_else(cache_dir: Path, source: Source) -> None:
    folder = CachedDataset(source).path
    folder.mkdir(parents=True)
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(errors.NotAStoreError, match=r"not a store: it holds 'thesis.tex'"):
        CachedDataset(source)[0]
    assert [p.name for p in folder.iterdir()] == ["thesis.tex"]


def test_a_file_in_the_place_of_the_folder(cache_dir: Path, source: Source) -> None:
    folder = CachedDataset(source).path
    folder.parent.mkdir(parents=True)
    folder.write_text("precious")
    with pytest.raises(errors.NotAStoreError, match="is a file"):
        CachedDataset(source)
    assert folder.read_text() == "precious"


def test_another_format_version(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(source)
    monkeypatch.setattr(stores, "FORMAT_LINE", b"torchcache 99")
    with pytest.raises(errors.FormatVersionError, match=r"torchcache 1.*torchcache 99.*remove the folder"):
        CachedDataset(source)


def test_another_dataset_under_the_same_key(cache_dir: Path, source: Source) -> None:
    filled(source, key="k")
    with pytest.raises(errors.StoreMismatchError, match=r"its source is 'helpers.Source'"):
        CachedDataset([0] * 200, key="k", name="Source")


@pytest.mark.parametrize("step", ["folder", "empty file", "no meta"])
def test_an_interrupted_creation_is_completed(cache_dir: Path, source: Source, step: str) -> None:
    folder = CachedDataset(source).path
    (folder / "owners").mkdir(parents=True)
    if step == "empty file":
        (folder / "data.mdb").touch()
    elif step == "no meta":
        lmdb.open(str(folder), max_dbs=1).close()
    check(CachedDataset(source))


def test_an_overwritten_beginning_is_damage(cache_dir: Path, source: Source) -> None:
    cached = filled(source)
    with open(cached.path / "data.mdb", "r+b") as file:
        file.write(bytes(8192))
    with pytest.warns(CacheBypassWarning, match=r"kept as .*damaged-.*cached anew"):
        check(CachedDataset(source))


def test_a_store_removed_while_it_is_used(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    list(DataLoader(cached, batch_size=50))
    shutil.rmtree(cached.path)
    check(cached)


@pytest.mark.parametrize("size", [0.5, 0.9])
def test_a_truncated_file_is_set_aside(cache_dir: Path, source: Source, size: float) -> None:
    cached = filled(source)
    data = cached.path / "data.mdb"
    os.truncate(data, int(data.stat().st_size * size))
    with pytest.warns(CacheBypassWarning, match=r"truncated.*kept as .*damaged-.*cached anew"):
        again = CachedDataset(source)
    check(again)
    assert again.complete
    assert len(list(cache_dir.glob("*.damaged-*"))) == 1
    check(CachedDataset(source))


def test_a_truncated_store_is_not_opened_without_its_dataset(cache_dir: Path, source: Source) -> None:
    cached = filled(source)
    os.truncate(cached.path / "data.mdb", 20_000)
    with pytest.raises(errors.CorruptStoreError, match="truncated"):
        CachedDataset.open(cached.path)
    assert cached.path.exists()


def test_flipped_bits_are_found(cache_dir: Path, tmp_path: Path, source: Source) -> None:
    cached = filled(source)
    original = (cached.path / "data.mdb").read_bytes()
    rng = random.Random(1)
    store = Store.open(cached.path)
    entries = store.entries(0)
    assert store.check_blocks() == len(entries)
    for entry in entries:
        position = entry.offset + rng.randrange(entry.head.nbytes)
        damaged = bytearray(original)
        damaged[position] ^= 1 << rng.randrange(8)
        (cached.path / "data.mdb").write_bytes(damaged)
        with pytest.raises(errors.CorruptStoreError):
            store.check_blocks()


def test_blocks_are_checked_after_a_restart_of_the_machine(
    cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffer, "ENOUGH_SAMPLES", 10)  # each batch becomes a block

    def half_filled() -> CachedDataset:
        cached = CachedDataset(source)
        for i in range(0, 100, 10):
            cached.__getitems__(list(range(i, i + 10)))
        cached.close()
        return cached

    cached = half_filled()
    stores._open_stores.clear()
    monkeypatch.setattr(stores, "boot_id", lambda: b"the next one")
    check(CachedDataset(source))  # undamaged: trusted again
    stores._open_stores.clear()
    shutil.rmtree(cached.path)

    store = Store.open(half_filled().path)
    offset = store.entries(0)[3].offset
    store.close()
    with open(cached.path / "data.mdb", "r+b") as file:
        file.seek(offset + 200)
        file.write(bytes(64))
    del store
    stores._open_stores.clear()
    monkeypatch.setattr(stores, "boot_id", lambda: b"one more")
    with pytest.warns(CacheBypassWarning, match=r"checksum.*cached anew"):
        check(CachedDataset(source))


def test_an_index_is_checked_after_a_restart_of_the_machine(
    cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached = CachedDataset(source)
    list(DataLoader(cached, batch_size=50))
    opened = cached._connection.open()
    assert opened is not None
    assert opened.store.seal is not None
    end = opened.store.seal.offset + opened.store.seal.nbytes
    with open(cached.path / "data.mdb", "r+b") as file:  # not closed, so not synced
        file.seek(end - 8)
        file.write(b"\xff" * 8)
    del opened, cached
    gc.collect()
    stores._open_stores.clear()
    monkeypatch.setattr(stores, "boot_id", lambda: b"the next one")
    with pytest.warns(CacheBypassWarning, match=r"index does not match its checksum.*cached anew"):
        check(CachedDataset(source))


def test_opening_looks_at_no_sample(cache_dir: Path, source: Source) -> None:
    """Neither time nor memory of opening a sealed store depends on how many samples it has."""
    filled(source).close()
    opened = CachedDataset(source)._connection.open()
    assert opened is not None
    places = opened.reader._places
    assert (places.schema_of, places.row_of) == (None, None)
    assert places.only is not None
    start = opened.reader._address
    assert all(
        start <= values.data_ptr() < start + len(opened.reader.map or b"")
        for values in [
            *(column for column in places.only.columns if len(column)),
            *(values for _, values in places.only.dense.values()),
        ]
    )


def test_the_checksum_of_a_small_index(cache_dir: Path, source: Source) -> None:
    cached = filled(source)
    opened = cached._connection.open()
    assert opened is not None
    assert opened.store.seal is not None
    offset = opened.store.seal.offset
    cached.close()
    del opened
    with open(cached.path / "data.mdb", "r+b") as file:
        file.seek(offset + 128)
        file.write(b"\1")
    with pytest.warns(CacheBypassWarning, match=r"index is damaged.*kept as .*cached anew"):
        check(CachedDataset(source))


def test_numbers_of_the_index_are_checked_when_they_are_used(
    cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of samples with two structures: schema numbers, then rows, that there are not; as in a large index."""
    monkeypatch.setattr(reader, "VERIFIED_BYTES", 0)
    source = Source(LENGTH, tmp_path / "reads", lambda i: torch.full((2 + i % 2,), i) if i % 3 else (i,))
    for number, position in (("ff", 128), ("7f", 128 + 4 * LENGTH // 64 * 64 + 64)):
        cached = filled(source, key=number)
        opened = cached._connection.open()
        assert opened is not None
        assert opened.store.seal is not None
        offset = opened.store.seal.offset
        cached.close()
        del opened
        with open(cached.path / "data.mdb", "r+b") as file:
            file.seek(offset + position)
            file.write(bytes.fromhex(number) * 256)
        cached = CachedDataset(source, key=number)
        with pytest.warns(CacheBypassWarning, match=r"the index names .*read from the source"):
            assert_same([cached[i] for i in range(LENGTH)], [source.make(i) for i in range(LENGTH)])
        with pytest.raises(errors.CorruptStoreError, match="the index names"):
            list(DataLoader(CachedDataset.open(cached.path), batch_size=1))


def test_damage_that_shows_while_training(cache_dir: Path, tmp_path: Path) -> None:
    """A ragged sample whose record lies outside the file is read from the source, with a warning."""
    source = Source(LENGTH, tmp_path / "reads", lambda i: torch.full((1 + i % 7,), i))
    cached = filled(source, key="k")
    offset = Store.open(cached.path).entries(0)[0].offset
    with open(cached.path / "data.mdb", "r+b") as file:
        file.seek(offset + 48)
        file.write(b"\xff" * 8 * 64)
    cached = CachedDataset(source, key="k")
    with pytest.warns(CacheBypassWarning, match=r"is damaged.*read from the source") as caught:
        assert_same([cached[i] for i in range(LENGTH)], [source.make(i) for i in range(LENGTH)])
    assert len(caught) == 1
    with pytest.raises(errors.CorruptStoreError):
        list(CachedDataset.open(cached.path))


@as_root
def test_a_full_disk(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(64, tmp_path / "reads", lambda i: torch.full((250_000,), i, dtype=torch.uint8))
    mounted(cache_dir, "size=8m")
    try:
        cached = CachedDataset(source, key="k")
        with pytest.warns(CacheBypassWarning, match=rf"{cache_dir}.*takes no more samples.*CACHE_DIR") as caught:
            for _ in range(2):
                assert [int(x[0, 0]) for x in DataLoader(cached, batch_size=1)] == list(range(64))
        assert len(caught) == 1
        assert 0 < cached.stats.samples_cached < 64
        cached.close()
        again = CachedDataset(source, key="k")
        assert int(again[0][0]) == 0
        assert again.stats.hits == 1
        again.close()
    finally:
        subprocess.run(["umount", "-l", str(cache_dir)], check=True)


@as_root
def test_read_only_mounts(cache_dir: Path, tmp_path: Path, source: Source) -> None:
    mounted(cache_dir, "size=64m")
    try:
        filled(source)
        half = CachedDataset(source, name="half")
        half.__getitems__(list(range(100)))
        half.close()
        subprocess.run(["mount", "-o", "remount,ro", str(cache_dir)], check=True)
        stores._open_stores.clear()
        before = source.reads().total()
        check(CachedDataset(source, check=0))
        assert source.reads().total() == before
        half = CachedDataset(source, name="half")
        with pytest.warns(CacheBypassWarning, match=r"may only be read. 100 of 200 samples are cached"):
            check(half)
        assert half.stats.hits == 200
        assert half.stats.samples_cached == 100
        with pytest.warns(CacheBypassWarning, match=r"cannot be used.*read from the source"):
            check(CachedDataset(source, name="new"))
    finally:
        subprocess.run(["umount", "-l", str(cache_dir)], check=True)


def test_a_folder_that_cannot_be_made(tmp_path: Path, source: Source) -> None:
    (tmp_path / "file").touch()
    cached = CachedDataset(source, cache_dir=tmp_path / "file" / "below")
    with pytest.warns(CacheBypassWarning, match=r"cannot be used.*CACHE_DIR") as caught:
        check(cached)
    assert len(caught) == 1
    assert cached.complete is False
    assert cached.stats.samples_cached == 0
    cached.fill(progress=False)


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from helpers import Source
from torchcache import CachedDataset
resource.setrlimit(resource.RLIMIT_AS, (8 << 30,) * 2)
source = Source(20, Path(sys.argv[1]), lambda i: torch.full((1 << 20,), i, dtype=torch.uint8))
cached = CachedDataset(source, key="k")
cached.fill()
assert cached.complete
assert [int(cached[i][-1]) for i in range(20)] == list(range(20))
"""


def test_little_address_space(cache_dir: Path, tmp_path: Path) -> None:
    folder = Path(__file__).parent
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path / "reads")], cwd=folder, check=True)


def test_the_file_is_as_large_as_its_content(cache_dir: Path, tmp_path: Path) -> None:
    payload = 100 * 8192
    source = Source(100, tmp_path / "reads", lambda i: torch.zeros(8192, dtype=torch.uint8))
    for cached in (filled(source, key="batches"), CachedDataset(source, key="items")):
        for i in range(100):
            cached[i]
        assert cached.complete
        status = (cached.path / "data.mdb").stat()
        assert status.st_size <= 1.1 * payload + 64 * 8192
        assert status.st_blocks * 512 <= 1.1 * payload + 64 * 8192


def test_samples_that_outgrow_the_first(cache_dir: Path, tmp_path: Path) -> None:
    source = Source(6, tmp_path / "reads", lambda i: torch.zeros(1 if i < 4 else 40_000_000, dtype=torch.uint8))
    cached = CachedDataset(source, key="k")
    assert [len(cached[i]) for i in range(6)] == [1] * 4 + [40_000_000] * 2
    assert cached.complete
    assert len(cached[5]) == 40_000_000


@pytest.mark.parametrize("batch_size", [1, 7])
def test_few_schemas_for_many_shapes(cache_dir: Path, tmp_path: Path, batch_size: int) -> None:
    source = Source(100, tmp_path / "reads", lambda i: (torch.zeros(3, 5 + i % 37), torch.zeros(i % 3), "x" * i))
    cached = CachedDataset(source, key="k")
    list(DataLoader(cached, batch_size=batch_size, collate_fn=list))
    assert cached._connection._cache is not None
    assert len(cached._connection._cache.store.schemas) <= 4
    assert_same([cached[i] for i in range(100)], [source.make(i) for i in range(100)])


def test_no_handle_crosses_a_fork(cache_dir: Path, source: Source) -> None:
    """Also not that of a store which is only looked at, or being made: LMDB would refuse the child."""
    path = CachedDataset(source).path
    Store.create(path, Identity("k", "s", 200))
    with Store.look(path) as looked:
        looked.survey()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert Store(path).counters() == Counters()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        assert looked.counters() == Counters()


def test_the_oldest_handles_are_closed_first(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "MOST_HANDLES", 3)
    stored = [Store.create(cache_dir / f"s{i}-k", Identity("k", "s", 10)) for i in range(5)]
    for i in (0, 1, 2, 3, 1, 4, 0):
        stored[i].counters()
    assert [store._env is not None for store in stored] == [True, False, False, True, True]
