"""What is remembered of a store for people to look at: what it has served, and what went into its key."""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import DataLoader

import torchcache
from torchcache import CachedDataset, catalog, fingerprint, folder, provenance, usage

FORK = multiprocessing.get_context("fork")
LENGTH = 200


@pytest.fixture
def full(cache_dir: Path, source: Source) -> CachedDataset:
    with CachedDataset(source, check=0) as cached:
        cached.fill(progress=False)
    return CachedDataset(source, check=0)


def saved(cached: CachedDataset) -> int:
    info = catalog.inspect(cached.path)
    assert info is not None
    assert info.hits == sum(info.hits_by_day.values())
    return info.hits


def test_hits_are_recorded_when_a_dataset_is_closed(full: CachedDataset) -> None:
    assert saved(full) == 0
    for index in range(30):
        full[index]
    assert saved(full) == 0  # nothing is written during an epoch
    full.close()
    assert saved(full) == 30
    full.close()
    assert saved(full) == 30
    full[0]
    full.close()
    info = catalog.inspect(full.path)
    assert info is not None
    assert info.hits_by_day == {int(time.time() // 86_400): 31}


@pytest.mark.parametrize("cls", [DataLoader, torchcache.DataLoader])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("collate_fn", [None, list])
def test_every_way_of_reading_counts_once(full: CachedDataset, cls: Any, num_workers: int, collate_fn: Any) -> None:
    for _ in cls(full, batch_size=16, num_workers=num_workers, collate_fn=collate_fn):
        pass
    full.close()
    assert saved(full) == LENGTH


def test_the_end_of_a_process_records_them(full: CachedDataset) -> None:
    code = (
        "import sys; from torchcache import CachedDataset; cached = CachedDataset.open(sys.argv[1]); "
        "[cached[i] for i in range(40)]"
    )
    subprocess.run([sys.executable, "-c", code, str(full.path)], check=True)
    assert saved(full) == 40


def test_a_forked_process_counts_its_own(full: CachedDataset) -> None:
    for index in range(10):
        full[index]
    pid = os.fork()
    if pid == 0:
        full[0]
        full.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert saved(full) == 1
    with FORK.Pool(1) as pool:
        assert pool.apply(read_some, (full,)) == 20
    full.close()
    assert saved(full) == 1 + 20 + 10


def read_some(cached: CachedDataset) -> int:
    for index in range(20):
        cached[index]
    cached.close()
    return cached.stats.hits


def test_several_processes_at_once(full: CachedDataset) -> None:
    gate = FORK.Barrier(8)

    def read() -> None:
        for _ in range(25):
            full[0]
            gate.wait()
            full.close()

    processes = [FORK.Process(target=read) for _ in range(8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert saved(full) == 8 * 25


def test_days_are_added_up_in_time(full: CachedDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    for day in range(2 * usage.MOST_DAYS):
        monkeypatch.setattr(time, "time", lambda day=day: 86_400.0 * (20_000 + day))
        usage.record(usage.Served(hits=day + 1), full.path)
    found = usage.read(full.path)
    assert found.total == sum(range(2 * usage.MOST_DAYS + 1))
    assert list(found.days) == [usage.EARLIER, *range(20_000 + usage.MOST_DAYS, 20_000 + 2 * usage.MOST_DAYS)]
    assert (full.path / "usage").stat().st_size == 16 * (usage.MOST_DAYS + 1)


@pytest.mark.parametrize(
    "content",
    [
        b"something else",
        bytes(16 * (usage.MOST_DAYS + 2)),
        struct.pack("<qqqq", 5, 1, 5, 1),
        struct.pack("<qqqq", 6, 1, 5, 1),
        struct.pack("<qq", 5, -1),
        struct.pack("<qq", -7, 1),
    ],
)
def test_another_file_in_its_place(full: CachedDataset, content: bytes) -> None:
    (full.path / "usage").write_bytes(content)
    assert saved(full) == 0
    full[0]
    full.close()
    assert saved(full) == 1


@pytest.mark.parametrize("kind", ["pipe", "endless", "folder", "huge"])
def test_what_is_no_file_is_neither_waited_for_nor_read(
    full: CachedDataset, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    place = full.path / "usage"
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "endless":
        place.symlink_to("/dev/zero")
    elif kind == "folder":
        place.mkdir()
    else:
        place.touch()
        os.truncate(place, 1 << 42)
    assert saved(full) == 0
    full[0]
    with caplog.at_level("DEBUG", "torchcache"):
        full.close()
    assert ("begun anew" if kind == "huge" else "are not recorded") in caplog.text
    assert saved(full) == (kind == "huge")


def test_recording_counts_as_a_use(full: CachedDataset) -> None:
    full[0]
    day_before = time.time() - 86_400
    for file in full.path.glob("*"):
        os.utime(file, (day_before, day_before))
    assert folder.last_used(full.path) < time.time() - 86_000
    full.close()
    assert folder.last_used(full.path) > time.time() - 60


def test_large_numbers(full: CachedDataset) -> None:
    (full.path / "usage").write_bytes(struct.pack("<qq", (1 << 62) - 1, (1 << 63) - 1))
    full[0]
    full.close()
    assert saved(full) == (1 << 63) - 1 + 1
    assert "9223372036854775808" in run("info", full.path)


def test_a_store_that_may_only_be_read(full: CachedDataset) -> None:
    (full.path / "usage").symlink_to("/dev/null")  # as good as one that cannot be opened
    full[0]
    full.close()
    assert saved(full) == 0
    full.path.joinpath("usage").unlink()
    full.close()
    assert saved(full) == 1  # it was kept until now


def test_the_file_belongs_to_the_store(full: CachedDataset) -> None:
    full[0]
    full.close()
    folder.refuse_foreign(full.path)
    catalog.destroy(full.path)
    assert not full.path.exists()


class Photos(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        self.root = "/data/photos"
        self.url = "https://me:hunter2@example.org/photos"
        self.storage_options = {"secret": "hunter2", "endpoint_url": "http://localhost"}
        self.api_token = "hunter2"
        self.keypoints = "body"
        self.files = [f"{number}.jpg" for number in range(10_000)]

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return image_and_label(index)


def test_what_went_into_the_key(cache_dir: Path) -> None:
    with CachedDataset(Photos()) as cached:
        cached.fill(progress=False)
    parts = catalog.describe(cached.path).parts
    assert parts is not None
    assert parts["dataset.root"] == "'/data/photos'"
    assert parts["dataset.keypoints"] == "'body'"
    assert parts["dataset.files"].startswith("list of 10000 ")
    assert parts["dataset.storage_options['endpoint_url']"] == "'http://localhost'"
    assert parts["dataset.storage_options['secret']"] == parts["dataset.api_token"] == "..."
    assert parts["dataset.url"] == "'https://...@example.org/photos'"
    assert b"hunter2" not in (cached.path / "data.mdb").read_bytes()
    shown = run("info", cached.path)
    assert "what went into the key" in shown and "dataset.root" in shown and "/data/photos" in shown


class Client:
    def __init__(self, user: str, where: str = "hunter2", *, token: str = "hunter2") -> None:
        self.user, self.where = user, len(where)
        self.apikey = self.accessToken = self.secret_value = self.pwd = "hunter2"
        self.headers = {"Authorization": "Bearer hunter2", "accept": "image/png"}
        self.options = {"client-secret": "hunter2", "connection_string": "AccountKey=hunter2"}
        self.signed = "https://example.org/photos?X-Amz-Signature=hunter2"
        self.odd = "https://me:p@hunter2@example.org/photos"
        self.long = f"https://me:hunter2{'x' * 100}@example.org/photos"
        self.password, self.token = 314159265, b"hunter2"
        self.keyboard, self.tokenizer, self.author = "qwertz", "words", "Ada"
        self.sign = (lambda secret: lambda: secret)("hunter2")


def test_secrets_are_left_out() -> None:
    record = provenance.to_record(fingerprint(Client("Ada"), explain=True).parts)
    assert b"hunter2" not in record and b"314159265" not in record
    found = provenance.from_record(record)
    assert found is not None
    assert found["dataset.headers['accept']"] == "'image/png'"
    assert (found["dataset.keyboard"], found["dataset.tokenizer"]) == ("'qwertz'", "'words'")
    assert found["dataset.author"] == found["dataset.user"] == "'Ada'"
    assert found["dataset.password"] == found["dataset.token"] == found["dataset.accessToken"] == "..."
    assert found["dataset.signed"] == "'https://example.org/photos?..."
    assert found["dataset.odd"] == "'https://...@example.org/photos'"


class Silent(pathlib.PurePosixPath):
    def __repr__(self) -> str:
        raise RuntimeError("not to be shown")


UNUSUAL = {
    "large": 10**5000,
    "very large": -(1 << 60_000),
    "silent": Silent("x"),
    "long": "x" * 100_000,
    "half a character": "\udc80",
    "a long name": {"k" * 9999: 1},
}


@pytest.mark.parametrize("value", UNUSUAL.values(), ids=UNUSUAL)
def test_what_cannot_be_shown_can_be_wrapped(cache_dir: Path, value: Any) -> None:
    """As long as a key could be had without an explanation of it."""
    photos = Photos()
    photos.value = value
    with CachedDataset(photos) as cached:
        assert cached.path.name.endswith(fingerprint(photos))
        assert_same(cached[0], image_and_label(0))
    shown = catalog.describe(cached.path).parts
    assert shown is not None
    assert len(shown["dataset.value"]) <= 80


def test_a_key_of_the_users(full: CachedDataset, source: Source) -> None:
    with CachedDataset(source, key="mine") as cached:
        cached[0]
    assert catalog.describe(cached.path).parts == {}
    assert "mine, given by the user" in run("info", cached.path)
    assert catalog.describe(full.path).parts != {}


def test_the_record_is_bounded() -> None:
    parts = {f"dataset.part{number}": "x" * 1000 for number in range(2000)}
    found = provenance.from_record(provenance.to_record(parts))
    assert found is not None
    assert len(found) == provenance.MOST_PARTS
    assert {len(what) for what in found.values()} == {provenance.MOST_CHARACTERS}


@pytest.mark.parametrize(
    "record", [b"", b" " * (provenance.MOST_BYTES + 1), b"[]", b"{", b'{"a": 1}', b"[" * 100_000, b"\xff"]
)
def test_a_record_that_is_none(record: bytes) -> None:
    with pytest.raises(torchcache.CorruptStoreError, match="what went into the key"):
        provenance.from_record(record)


def test_a_store_without_the_record(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    """As before there was one."""
    monkeypatch.setattr(provenance, "to_record", lambda parts: b"")
    with CachedDataset(source) as cached:
        cached.fill(progress=False)
    assert catalog.describe(cached.path).parts is None
    assert_same(CachedDataset(source)[3], image_and_label(3))
    assert "what went into the key: -" in run("info", cached.path)


def run(*arguments: Any) -> str:
    command = [sys.executable, "-m", "torchcache", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
