"""What is told of stores, their verification, and getting rid of them."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import hostile
import lmdb
import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label, open_descriptors

from torchcache import CachedDataset, catalog, errors, folder, pagecache
from torchcache.catalog import StoreInfo
from torchcache.store import Store

FORK = multiprocessing.get_context("fork")
LENGTH = 200
DAY_S = 86_400.0


class Point(NamedTuple):
    x: torch.Tensor
    name: str


def point(index: int) -> dict[str, Any]:
    return {"point": Point(torch.arange(index % 7), str(index)), "label": index % 10, "none": None}


def filled(source: Source, indices: Any = None, **options: Any) -> Path:
    with CachedDataset(source, **options) as cached:
        cached.fill(progress=False, indices=indices)
    return cached.path


def only(cache_dir: Path) -> StoreInfo:
    (info,) = catalog.stores(cache_dir)
    return info


def last_used_ago(path: Path, seconds: float) -> None:
    moment = time.time() - seconds
    for file in (path, path / folder.GUARD_FILE, path / "data.mdb"):
        if file.exists():
            os.utime(file, (moment, moment))


@contextmanager
def another_process(work: Callable[[], object]) -> Iterator[int]:
    """One that has done some work and lives on; killed at the end."""
    ours, theirs = FORK.Pipe()

    def run() -> None:
        kept = work()
        theirs.send(kept is not None)
        theirs.recv()

    process = FORK.Process(target=run)
    process.start()
    theirs.close()
    try:
        ours.recv()
        assert process.pid is not None
        yield process.pid
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("complete", [True, False])
def test_a_process_that_uses_a_store_can_be_seen_until_it_dies(cache_dir: Path, source: Source, complete: bool) -> None:
    path = filled(source, None if complete else range(50))
    assert not folder.in_use(path)

    def use() -> CachedDataset:
        cached = CachedDataset(source)
        cached[3]
        return cached

    with another_process(use) as pid:
        for _ in range(3):
            assert folder.in_use(path)
        info = only(cache_dir)
        assert (info.in_use, info.filling) == (True, 0)
        with pytest.raises(errors.StoreUnavailableError, match="a process has it open"):
            catalog.destroy(path)
        assert catalog.prune(cache_dir, max_bytes=0).removed == []
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert not folder.in_use(path)
    assert not only(cache_dir).in_use
    catalog.destroy(path)
    assert os.listdir(cache_dir) == []


def test_a_process_that_fills_can_be_seen(cache_dir: Path, source: Source) -> None:
    def read_one() -> CachedDataset:
        cached = CachedDataset(source)
        cached[0]
        cached.stats  # noqa: B018 publishes it
        return cached

    with another_process(read_one):
        info = only(cache_dir)
        assert (info.state, info.samples, info.filling, info.in_use) == ("filling", 1, 1, True)
        with pytest.raises(errors.StoreUnavailableError, match="1 processes are filling it"):
            catalog.destroy(info.path)
        catalog.destroy(info.path, force=True)
    assert catalog.stores(cache_dir) == []


def test_a_fork_goes_on_using_what_its_parent_has_closed(cache_dir: Path, source: Source) -> None:
    path = filled(source)
    ours = [CachedDataset(source)]
    ours[0][0]
    with another_process(lambda: ours[0][1]):
        ours.pop().close()
        assert folder.in_use(path)
    assert not folder.in_use(path)


def test_a_view_goes_on_using_a_store_that_is_closed(cache_dir: Path, source: Source) -> None:
    filled(source)
    cached = CachedDataset(source, copy=False)
    view = cached[3][0]
    cached.close()
    assert folder.in_use(cached.path)
    assert view[0, 0, 0] == 3
    del view
    assert not folder.in_use(cached.path)


def test_who_asks_takes_nobodys_mark_away(cache_dir: Path, source: Source) -> None:
    path = filled(source)

    def ask() -> None:
        while True:
            folder.in_use(path)

    process = FORK.Process(target=ask)
    process.start()
    try:
        for _ in range(30):
            with CachedDataset(source) as cached:
                cached[0]
                assert folder.in_use(path)
    finally:
        process.kill()
        process.join()


def test_a_sealed_store_takes_one_descriptor(cache_dir: Path, source: Source) -> None:
    filled(source)
    before = open_descriptors()
    cached = CachedDataset(source)
    cached[0]
    assert open_descriptors() == before + 1
    cached.close()
    assert open_descriptors() == before


def test_what_is_told_of_a_store(cache_dir: Path, source: Source) -> None:
    assert catalog.stores(cache_dir) == []
    began = time.time() - 1
    path = filled(source, range(50), name="half", key="a key of mine")
    info = only(cache_dir)
    assert (info.path, info.state, info.problem) == (path, "partial", "")
    assert (info.key, info.source, info.samples, info.length) == ("a key of mine", "helpers.Source", 50, LENGTH)
    assert info.source_reads == 50
    assert info.source_seconds is not None and 0 < info.source_seconds < 60
    assert began < info.last_used < time.time() + 1
    assert info.nbytes > 50 * 200
    filled(source, name="half", key="a key of mine")
    assert only(cache_dir).state == "complete"
    assert only(cache_dir).source_reads == LENGTH + 1  # one sample was compared


def test_looking_is_no_use(cache_dir: Path, source: Source) -> None:
    path = filled(source)
    last_used_ago(path, DAY_S)
    before = catalog.stores(cache_dir)
    catalog.verify(path)
    catalog.describe(path)
    catalog.warm(path)
    assert catalog.stores(cache_dir)[0].last_used == before[0].last_used
    assert time.time() - before[0].last_used > DAY_S - 60
    CachedDataset(source)[0]
    assert time.time() - only(cache_dir).last_used < 60


def test_what_is_not_right_is_listed(cache_dir: Path, source: Source) -> None:
    names = ["cut", "text", "zeros", "newer", "lost", "fine"]
    paths = {name: filled(source, name=name, key="k") for name in names}
    os.truncate(paths["cut"] / "data.mdb", 20_000)
    (paths["text"] / "data.mdb").write_text("something else")
    (paths["zeros"] / "data.mdb").write_bytes(bytes(100_000))
    with lmdb.open(str(paths["newer"]), max_dbs=6) as env, env.begin(write=True) as txn:
        txn.put(b"format", b"torchcache 99", db=env.open_db(b"meta", txn=txn))
    with lmdb.open(str(paths["lost"]), max_dbs=6) as env, env.begin(write=True) as txn:
        txn.put(b"identity", b"{}", db=env.open_db(b"meta", txn=txn))
    (cache_dir / "made-k" / "owners").mkdir(parents=True)
    (cache_dir / "made-k" / "store.lock").touch()
    paths["fine"].rename(cache_dir / "fine-k.removed-0123abcd")
    (cache_dir / "thesis").mkdir()
    (cache_dir / "thesis" / "data.mdb").write_text("precious")
    (cache_dir / "staged").mkdir()
    (cache_dir / "file").touch()
    found = {info.path.name: info for info in catalog.stores(cache_dir)}
    assert {name: info.state for name, info in found.items()} == {
        "cut-k": "damaged",
        "text-k": "damaged",
        "zeros-k": "damaged",
        "newer-k": "other version",
        "lost-k": "damaged",
        "made-k": "empty",
        "fine-k.removed-0123abcd": "leftover",
    }
    assert "truncated" in found["cut-k"].problem
    assert "not an LMDB file" in found["text-k"].problem
    assert "torchcache 99" in found["newer-k"].problem
    assert "does not say what it holds" in found["lost-k"].problem


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_store_of_another_user(cache_dir: Path, source: Source, tmp_path: Path) -> None:
    path = filled(source)
    for place in (tmp_path, *tmp_path.parents[:2]):
        place.chmod(0o755)
    path.chmod(0o700)

    def look() -> None:
        os.setuid(65534)
        (info,) = [catalog.inspect(path)]
        assert info is None or info.state == "unreadable"
        path.parent.stat()

    process = FORK.Process(target=look)
    process.start()
    process.join()
    assert process.exitcode == 0


def test_how_much_is_in_memory(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    path = filled(source)
    data = path / "data.mdb"
    with open(data, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = data.stat().st_size
    cold = pagecache.resident_bytes(data)
    assert cold is not None
    told: list[int] = []
    assert catalog.warm(path, progress=told.append) == size == sum(told)
    assert pagecache.resident_bytes(data) == size
    assert cold <= size
    with monkeypatch.context() as patched:
        patched.setattr(pagecache, "_CACHESTAT", -1)  # an older kernel
        assert pagecache.resident_bytes(data) == size
    room = pagecache.room()
    assert room is not None and 0 < room.nbytes < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE")
    with open(data, "r+b") as file:
        file.truncate(2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGESIZE"))  # of nothing
    with pytest.raises(errors.StoreUnavailableError, match=r"does not fit into memory: \d+ bytes .* leaves \d+"):
        catalog.warm(path)


def test_the_description_names_every_leaf(cache_dir: Path, tmp_path: Path) -> None:
    path = filled(Source(LENGTH, tmp_path / "reads", point))
    described = catalog.describe(path)
    assert (described.sealed, described.allow_pickle, described.claimed) == (True, False, 0)
    assert sum(schema.samples for schema in described.schemas) == LENGTH
    columns = {column.name: column for column in described.schemas[-1].columns}
    assert list(columns) == ["['point'].x", "['point'].name", "['label']"]
    assert (columns["['point'].x"].dtype, columns["['point'].x"].shape) == ("int64", None)
    total = [sum(column.nbytes for s in described.schemas for column in s.columns if column.name == n) for n in columns]
    assert total == [sum(8 * (i % 7) for i in range(LENGTH)), sum(len(str(i)) for i in range(LENGTH)), 8 * LENGTH]
    assert described.block_bytes > sum(total)


@pytest.mark.parametrize("indices", [None, range(50)])
def test_a_store_that_is_right(cache_dir: Path, tmp_path: Path, indices: Any) -> None:
    source = Source(LENGTH, tmp_path / "reads", point)
    path = filled(source, indices)
    told: list[tuple[int, int]] = []
    report = catalog.verify(path, lambda *progress: told.append(progress))
    samples = LENGTH if indices is None else 50
    assert (report.samples, report.length, report.sealed) == (samples, LENGTH, indices is None)
    assert report.blocks == len(told) == len(Store.open(path).entries(0))
    assert sum(nbytes for nbytes, _ in told) == told[0][1] == report.nbytes
    assert catalog.compare(path, source) == samples
    assert catalog.compare(path, source, 7) == 7


def test_a_bit_anywhere_in_a_block_or_in_the_index(cache_dir: Path, tmp_path: Path) -> None:
    path = filled(Source(LENGTH, tmp_path / "reads", point))
    data = path / "data.mdb"
    original = data.read_bytes()
    with Store.look(path) as opened:
        parts = [(entry.offset, entry.head.nbytes) for entry in opened.survey().entries]
        assert opened.seal is not None
        parts.append((opened.seal.offset, opened.seal.nbytes))
    rng = random.Random(1)
    for offset, nbytes in parts * 20:
        position = offset + rng.randrange(nbytes)
        damaged = bytearray(original)
        damaged[position] ^= 1 << rng.randrange(8)
        data.write_bytes(damaged)
        with pytest.raises(errors.CorruptStoreError):
            catalog.verify(path)
    data.write_bytes(original)
    catalog.verify(path)


def change(path: Path, database: bytes, key: bytes, value: Callable[[bytes], bytes | None]) -> None:
    """Changes a value as somebody would who knows the format."""
    with lmdb.open(str(path), max_dbs=6) as env, env.begin(write=True) as txn:
        db = env.open_db(database, txn=txn)
        new = value(txn.get(key, db=db))
        if new is None:
            txn.delete(key, db=db)
        else:
            txn.put(key, new, db=db)


def second_sample_again(record: bytes) -> bytes:
    indices = np.frombuffer(record[56:], "<i8").copy()
    indices[0] = indices[1]
    return record[:56] + indices.tobytes()


def one_sample_more(counters: bytes) -> bytes:
    values = list(struct.unpack("<QQQQd", counters))
    values[2] += 1
    return struct.pack("<QQQQd", *values)


@pytest.mark.parametrize(
    ("database", "key", "value", "message"),
    [
        (b"ids", bytes(8), second_sample_again, "sample 1 is there more than once"),
        (b"meta", b"counters", one_sample_more, "its totals say 201 samples"),
        (b"ids", bytes(8), lambda record: None, "the log names 0 blocks, and there are 1|block 0 is missing"),
        (b"ids", bytes(8), lambda record: record + b"odd", "the log does not say what it holds"),
        (b"meta", b"counters", lambda counters: b"", "has lost its totals"),
        (b"schemas", bytes(8), lambda text: None, "schema|unknown"),
    ],
)
def test_what_checksums_do_not_see(
    cache_dir: Path, source: Source, database: bytes, key: bytes, value: Any, message: str
) -> None:
    path = filled(source)
    change(path, database, key, value)
    with pytest.raises(errors.CorruptStoreError, match=message):
        catalog.verify(path)


def test_an_index_that_contradicts_the_log(cache_dir: Path, source: Source) -> None:
    path = filled(source)

    def swapped(record: bytes) -> bytes:
        return record[:56] + np.frombuffer(record[56:], "<i8")[::-1].tobytes()

    change(path, b"ids", bytes(8), swapped)
    with pytest.raises(errors.CorruptStoreError, match="the index is not that of the log"):
        catalog.verify(path)


def test_verifying_while_others_fill(cache_dir: Path, source: Source) -> None:
    def fill_twenty() -> CachedDataset:
        cached = CachedDataset(source)
        cached.__getitems__(range(20))
        cached.stats  # noqa: B018 publishes them
        return cached

    with another_process(fill_twenty), CachedDataset(source) as cached:
        for start in range(20, LENGTH, 20):
            report = catalog.verify(cached.path)
            assert report.samples == start
            cached.fill(progress=False, indices=range(start, start + 20))
            cached.stats  # noqa: B018 publishes them
    assert catalog.verify(cached.path).samples == LENGTH


def test_the_source_is_another_one_now(cache_dir: Path, source: Source, tmp_path: Path) -> None:
    path = filled(source)
    other = Source(
        LENGTH, tmp_path / "others", lambda i: (torch.arange(48.0).reshape(3, 4, 4) + (i - (i == 77)), i % 10)
    )
    with pytest.raises(errors.StaleCacheError, match="of sample 77"):
        catalog.compare(path, other)


def test_damage_anywhere_is_an_error_of_ours(cache_dir: Path, source: Source) -> None:
    paths = [filled(source, name="whole", key="k"), filled(source, range(50), name="part", key="k")]
    originals = [(path / "data.mdb").read_bytes() for path in paths]

    def read_all() -> None:
        found = 0
        for seed in range(60):
            rng, path = random.Random(seed), paths[seed % 2]
            (path / "data.mdb").write_bytes(originals[seed % 2])
            hostile.damage(path / "data.mdb", rng)
            catalog.stores(cache_dir)
            for read in (catalog.verify, catalog.describe):
                try:
                    read(path)
                except errors.StoreError:
                    found += read is catalog.verify
        assert found > 30

    process = FORK.Process(target=read_all)
    process.start()
    process.join()
    assert process.exitcode == 0  # neither another error, nor a signal


def test_only_stores_are_removed(tmp_path: Path, cache_dir: Path, source: Source) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "data.mdb").write_text("precious")
    (tmp_path / "thesis" / "thesis.tex").write_text("precious")
    for place in (tmp_path / "thesis", tmp_path / "nothing", tmp_path):
        with pytest.raises(errors.NotAStoreError):
            catalog.destroy(place)
    with pytest.raises(errors.NotAStoreError):
        catalog.warm(tmp_path / "thesis")
    assert len(os.listdir(tmp_path / "thesis")) == 2


def test_a_job_whose_store_is_removed_goes_on(cache_dir: Path, source: Source) -> None:
    for indices in (None, range(50)):
        path = filled(source, indices)
        cached = CachedDataset(source)
        cached[0]
        catalog.destroy(path, force=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what can be cached no more
            assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
            cached.close()


def test_pruning(cache_dir: Path, source: Source) -> None:
    ages = {"a": 5, "b": 4, "c": 3, "d": 2, "e": 1}
    paths = {name: filled(source, name=name, key="k") for name in ages}
    for name, path in paths.items():
        last_used_ago(path, ages[name] * DAY_S)
    size = catalog.stores(cache_dir)[0].nbytes
    (cache_dir / "new-k").mkdir()
    (cache_dir / "new-k" / "store.lock").touch()
    (cache_dir / "old-k").mkdir()
    (cache_dir / "old-k" / "store.lock").touch()
    last_used_ago(cache_dir / "old-k", 3600)
    (cache_dir / "x-k.damaged-01234567").mkdir()
    os.truncate(paths["e"] / "data.mdb", 20_000)
    last_used_ago(paths["e"], 0)

    def removed(**options: Any) -> dict[str, str]:
        found = catalog.prune(cache_dir, **options)
        assert found.left_bytes == sum(i.nbytes for i in catalog.stores(cache_dir)) - found.nbytes * bool(
            options.get("dry_run")
        )
        return {info.path.name: reason for info, reason in found.removed}

    with another_process(lambda: CachedDataset(source, name="a", key="k")):
        last_used_ago(paths["a"], 5 * DAY_S)
        always = {"old-k": "empty", "x-k.damaged-01234567": "set aside", "e-k": "damaged"}
        assert removed(dry_run=True) == always
        assert removed(older_than_s=3.5 * DAY_S) == {**always, "b-k": "not used for so long"}
        assert removed(max_bytes=int(2.5 * size)) == {"c-k": "least recently used"}
        assert removed(max_bytes=0) == {"d-k": "least recently used"}
    assert {info.path.name for info in catalog.stores(cache_dir)} == {"a-k", "new-k"}
