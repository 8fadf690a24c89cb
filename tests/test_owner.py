"""Owners: what they have claimed is theirs, whatever becomes of them and of their files."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers import Source, assert_same, image_and_label, other_owner

from torchcache import CachedDataset, catalog, owner
from torchcache.store import Store, destroy_if_empty

LENGTH = 200
FORK = multiprocessing.get_context("fork")
GO_ON, FAIL = b"g", b"f"
NEVER_S = 1e6  # nobody waits so long: a test that did would not end


def file_of(cached: CachedDataset, other: owner.Owner) -> Path:
    return cached.path / "owners" / f"{other.id.hex()}.lock"


@pytest.mark.parametrize("count", [0, 1, 64, 1022, 1023, 1024, 5000])
def test_claims_are_read_as_written(tmp_path: Path, count: int) -> None:
    mine = owner.Owner(tmp_path / "owners")
    for indices in (list(range(7000)), list(range(count)), [1 << 40] * count):  # the first is longer
        mine.keep(indices[::2])
        mine.claim(indices[1::2])
        found = owner.claims(tmp_path / "owners", mine.id)
        assert found.tolist() == indices[::2] + indices[1::2]
        assert mine.count == len(indices)
    size = (tmp_path / "owners" / f"{mine.id.hex()}.lock").stat().st_size
    assert size == 8 * 7001
    mine.release()
    mine.release()
    assert owner.claims(tmp_path / "owners", mine.id).tolist() == []
    assert list((tmp_path / "owners").iterdir()) == []


def test_looking_at_an_owner_leaves_it_alone(tmp_path: Path) -> None:
    folder = tmp_path / "owners"
    mine = owner.Owner(folder)
    mine.claim([3, 4])
    assert owner.is_alive(folder, mine.id)
    assert (owner.sweep(folder), owner.count_alive(folder), owner.any_alive(folder)) == (0, 1, True)
    assert owner.claims(folder, mine.id).tolist() == [3, 4]
    mine.forget()  # as if its process were dead
    assert owner.sweep(folder) == 1
    assert not owner.any_alive(folder)


def _link_to_nothing(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.touch(),
        lambda path: path.write_bytes(b"odd"),
        lambda path: path.write_bytes(bytes(8000)),
        lambda path: path.write_bytes(struct.pack("<Q", 1 << 63)),
        lambda path: path.write_bytes(b"\xff" * 9001),
        lambda path: path.write_bytes(struct.pack("<Q3q", 3, -1, -(1 << 63), (1 << 63) - 1)),
        lambda path: path.mkdir(),
        os.mkfifo,
        _link_to_nothing,
    ],
)
def test_files_that_are_no_owners(cache_dir: Path, source: Source, write: Callable[[Path], None]) -> None:
    """Left over, or put there: none of them keeps anybody waiting."""
    cached = CachedDataset(source, claim_timeout_s=NEVER_S)
    cached[0]
    path = cached.path / "owners" / f"{'ab' * 16}.lock"
    write(path)
    late = other_owner(cached, [7])  # lets the process look at the folder again
    late.release()
    assert_same(cached.__getitems__(list(range(100))), [image_and_label(i) for i in range(100)])
    catalog.describe(cached.path)
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
    assert cached.complete
    assert source.reads() == Counter(range(LENGTH))


def test_a_file_that_promises_much_takes_no_memory(tmp_path: Path) -> None:
    (tmp_path / f"{'ab' * 16}.lock").write_bytes(struct.pack("<Q", (1 << 64) - 1))
    os.truncate(tmp_path / f"{'ab' * 16}.lock", 1 << 40)
    found = owner.claims(tmp_path, bytes.fromhex("ab" * 16))
    assert len(found) == owner.MOST_CLAIMS


@pytest.mark.parametrize("change", [lambda file: os.truncate(file, 0), lambda file: file.write_bytes(bytes(64))])
def test_a_live_owner_whose_file_was_emptied(cache_dir: Path, source: Source, change: Callable[[Path], None]) -> None:
    """Its samples are read by others as well, and stored once."""
    cached = CachedDataset(source, claim_timeout_s=NEVER_S)
    cached[0]
    other = other_owner(cached, [5, 6])
    change(file_of(cached, other))
    assert_same(cached.__getitems__([5, 6, 7]), [image_and_label(i) for i in (5, 6, 7)])
    other.release()


def test_claims_that_somebody_is_reading_now(cache_dir: Path, source: Source) -> None:
    """Of those who live, and without what has been published."""
    cached = CachedDataset(source)
    cached[0]
    living, dead = other_owner(cached, [5, 6, 7]), other_owner(cached, [8, 9])
    dead.forget()
    assert catalog.describe(cached.path).claimed == 4
    cached.close()  # which publishes sample 0, and
    living.keep([])
    living.claim([0, 6, 7])  # as if the other had claimed it
    assert catalog.describe(cached.path).claimed == 2
    living.release()
    assert catalog.describe(cached.path).claimed == 0


def test_more_owners_than_files_are_kept_open(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are asked; who gives up has no claims any more, also where its file is still open here."""
    gc.collect()
    before = len(owner._kept)  # of stores of other tests
    monkeypatch.setattr(owner, "MOST_DESCRIPTORS", before + 3)
    cached = CachedDataset(source, claim_timeout_s=NEVER_S)
    cached[0]
    cache = cached._connection._cache
    assert cache is not None
    others = [other_owner(cached, [10 * i + j for j in range(10)]) for i in range(1, 8)]
    mine = owner.Owner(cached.path / "owners")
    cache.store.join(mine)
    claim = cache.store.claim(mine, 0, lambda entries: list(range(5, 95)))
    assert claim.granted == [*range(5, 10), *range(80, 95)]
    assert claim.held == {10 * i + j: others[i - 1].id for i in range(1, 8) for j in range(10)}
    assert len(owner._kept) == before + 3
    for other in others:
        other.release()
    assert cache.store.claim(mine, 0, lambda entries: list(range(10, 80))).granted == list(range(10, 80))
    mine.release()
    assert_same(cached.__getitems__(list(range(LENGTH))), [image_and_label(i) for i in range(LENGTH)])
    assert source.reads() == Counter(range(LENGTH))


class Held(Source):
    """In one process, says when sample 5 is read, and waits there for a byte: to go on, or to fail."""

    def __init__(self, log: Path) -> None:
        super().__init__(LENGTH, log)
        self.holder = 0  # its number, known in that process
        self.reached, self.go_on = os.pipe(), os.pipe()

    def __fingerprint__(self) -> Any:
        return "held"

    def __getitem__(self, index: Any) -> Any:
        if index == 5 and self.holder == os.getpid():
            os.write(self.reached[1], b"x")
            if os.read(self.go_on[0], 1) == FAIL:
                raise KeyError("sample 5")
        return super().__getitem__(index)


@pytest.fixture
def held(tmp_path: Path) -> Held:
    return Held(tmp_path / "reads")


def hold(held: Held, with_child: bool = False) -> Any:
    """A process that has claimed samples 3 to 8 and is reading sample 5; maybe with a child that outlives it."""

    def run() -> None:
        held.holder = os.getpid()
        cached = CachedDataset(held, claim_timeout_s=NEVER_S, check=0)
        cached[100]  # it is an owner before it forks
        if with_child and os.fork() == 0:
            os.read(held.go_on[0], 1)
            os._exit(0)
        cached.__getitems__([3, 4, 5, 6, 7, 8])
        cached.close()

    process = FORK.Process(target=run)
    process.start()
    assert os.read(held.reached[0], 1) == b"x"
    return process


def test_a_process_that_came_later_is_seen(cache_dir: Path, held: Held) -> None:
    """Its claims are respected by one that has begun before, and given up when it has published."""
    cached = CachedDataset(held, claim_timeout_s=NEVER_S)
    for i in range(50, 60):
        cached[i]
    process = hold(held)
    assert_same(cached.__getitems__([2, 9]), [image_and_label(i) for i in (2, 9)])
    waiting = FORK.Process(target=_read_all, args=(held,))
    waiting.start()
    assert catalog.describe(cached.path).claimed >= 6
    os.write(held.go_on[1], GO_ON)
    assert_same(cached.__getitems__([4, 5]), [image_and_label(i) for i in (4, 5)])
    for job in (process, waiting):
        job.join()
        assert job.exitcode == 0
    assert held.reads() == Counter(range(LENGTH))


def _read_all(source: Source) -> None:
    cached = CachedDataset(source, claim_timeout_s=NEVER_S, check=0)
    assert_same(cached.__getitems__(list(range(LENGTH))), [image_and_label(i) for i in range(LENGTH)])
    cached.close()


@pytest.mark.parametrize("with_child", [False, True])
def test_a_killed_owners_claims_are_taken_over(cache_dir: Path, held: Held, with_child: bool) -> None:
    """At once, also if a child that it has forked lives on: the lock was its own."""
    process = hold(held, with_child)
    cached = CachedDataset(held, claim_timeout_s=NEVER_S, check=0)
    os.kill(process.pid, signal.SIGKILL)
    assert_same(cached.__getitems__(list(range(10))), [image_and_label(i) for i in range(10)])
    process.join()
    os.write(held.go_on[1], GO_ON)
    cached.fill(progress=False)
    assert cached.complete
    assert set(held.reads()) == set(range(LENGTH))
    assert max(held.reads().values()) <= 2
    cached.close()
    assert list((cached.path / "owners").iterdir()) == []


def test_claims_that_are_given_back_are_noticed(cache_dir: Path, held: Held) -> None:
    """The source fails in one process; who waits for its samples reads them, and does not wait for its end."""
    process = hold(held)
    cached = CachedDataset(held, claim_timeout_s=NEVER_S, check=0)
    waiting = FORK.Process(target=_read_all, args=(held,))
    waiting.start()
    os.write(held.go_on[1], FAIL)
    waiting.join()
    assert waiting.exitcode == 0
    process.join()
    assert process.exitcode == 1  # KeyError
    assert cached.complete
    assert held.reads() == Counter(range(LENGTH))


def test_killed_while_it_claims(cache_dir: Path, source: Source) -> None:
    """Again and again: what others see of its claims, whole or torn, ends with it."""

    def claim_for_ever() -> None:
        other = CachedDataset(source, check=0)
        other[0]
        cache = other._connection._cache
        assert cache is not None
        mine = other_owner(other, [])
        while True:
            cache.store.claim(mine, 0, lambda entries: list(range(20, 180)))

    cached = CachedDataset(source, claim_timeout_s=NEVER_S, check=0)
    cached[0]
    folder = cached.path / "owners"
    for number in range(5):
        known = set(owner.ids(folder))
        process = FORK.Process(target=claim_for_ever)
        process.start()
        while not any(len(owner.claims(folder, new)) for new in {*owner.ids(folder)} - known):
            assert process.is_alive()
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        batch = [20 + 30 * number + i for i in range(30)]
        assert_same(cached.__getitems__(batch), [image_and_label(i) for i in batch])
    assert_same(cached.__getitems__(list(range(LENGTH))), [image_and_label(i) for i in range(LENGTH)])
    assert source.reads() == Counter(range(LENGTH))
    with open(cached.path / "writer.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it


def test_an_empty_store_of_which_somebody_reads_is_kept(cache_dir: Path, source: Source) -> None:
    with CachedDataset(source) as cached:
        assert not cached.complete  # which makes the store
    store = Store.open(cached.path)
    living = owner.Owner(store.path / "owners")
    store.join(living)
    store.claim(living, 0, lambda entries: [1])
    assert not destroy_if_empty(store)
    living.keep([])
    living.claim([])
    assert destroy_if_empty(store)
    assert not store.path.exists()
    living.release()
