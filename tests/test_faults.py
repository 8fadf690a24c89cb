"""Folders, file systems, limits: where a cache cannot be what it should be, the job goes on and says why."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import stat
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import Source, assert_same, image_and_label
from torch.utils.data import DataLoader

import torchcache
from torchcache import CacheBypassWarning, CachedDataset, CacheFolderWarning, filesystem, packing, store

LENGTH = 200
HERE = Path(__file__).parent
FORK = multiprocessing.get_context("fork")
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def filled(source: Any, **options: Any) -> CachedDataset:
    cached = CachedDataset(source, **options)
    cached.fill(progress=False)
    cached.close()
    return cached


def check(cached: Any) -> None:
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Has the folder given as mounted with a file system of this type."""

    def mounted(folder: Path, kind: str) -> None:
        point = str(folder).replace(" ", "\\040")
        table = tmp_path / "mountinfo"
        table.write_text(
            "22 1 254:0 / / rw,relatime - ext4 /dev/vda rw\n"
            f"30 22 0:40 / {point} rw,relatime - ext4 hidden rw\n"
            f"31 22 0:41 / {point} rw,relatime shared:1 - {kind} server:/export rw\n"
            f"32 22 0:42 / {point}2 rw,relatime - ext4 beside rw\n"
        )
        monkeypatch.setattr(filesystem, "_MOUNTS", table)

    return mounted


def test_the_file_system_under_a_folder(tmp_path: Path, mounts: Any) -> None:
    mounts(tmp_path / "a b", "nfs4")
    assert filesystem.kind_of(tmp_path / "a b" / "not made yet") == "nfs4"
    assert filesystem.kind_of(tmp_path / "a b2" / "x") == "ext4"
    assert filesystem.kind_of(tmp_path / "a bc") == "ext4"
    (tmp_path / "link").symlink_to(tmp_path / "a b")
    assert filesystem.kind_of(tmp_path / "link" / "x") == "nfs4"


def test_the_file_system_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filesystem, "_MOUNTS", Path("/proc/self/mountinfo"))
    assert filesystem.kind_of(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("kind", ["nfs", "cifs", "lustre", "9p", "fuse.s3fs"])
def test_a_network_file_system_is_not_filled(cache_dir: Path, source: Source, mounts: Any, kind: str) -> None:
    mounts(cache_dir, kind)
    with pytest.warns(CacheBypassWarning, match=rf"lie on {kind}.*read from the source") as caught:
        check(CachedDataset(source))
    assert len(caught) == 1
    assert not cache_dir.exists()


def test_what_lies_on_a_network_file_system_is_served(cache_dir: Path, source: Source, mounts: Any) -> None:
    cached = CachedDataset(source)
    cached.__getitems__(list(range(100)))
    cached.close()
    mounts(cache_dir, "nfs")
    store._open_stores.clear()
    with pytest.warns(CacheBypassWarning, match=r"lies on nfs: a network.*100 of 200 samples are cached") as caught:
        again = CachedDataset(source, check=0)
        check(again)
    assert len(caught) == 1
    assert again.stats.hits == 100


@pytest.mark.parametrize("kind", ["overlay", "fuseblk"])
def test_a_layer_of_a_container_is_warned_of(cache_dir: Path, source: Source, mounts: Any, kind: str) -> None:
    mounts(cache_dir, kind)
    with pytest.warns(CacheFolderWarning, match=rf"lies on {kind}: .*CACHE_DIR") as caught:
        check(CachedDataset(source))
    assert len(caught) == 1


class Rooted(Source):
    def __init__(self, root: Any, log: Path) -> None:
        super().__init__(LENGTH, log)
        self.root = root


@pytest.mark.parametrize("wrap", [lambda ds: ds, lambda ds: torch.utils.data.Subset(ds, [0, 1])])
def test_a_store_in_the_datasets_folder_is_refused(tmp_path: Path, wrap: Any) -> None:
    root = tmp_path / "images"
    root.mkdir()
    for where in (root, root / "cache"):
        with pytest.raises(ValueError, match=r"dataset's own folder .*images lie one inside the other.*cache_dir="):
            CachedDataset(wrap(Rooted(str(root), tmp_path / "reads")), cache_dir=where)
    assert list(root.iterdir()) == []
    CachedDataset(wrap(Rooted(root, tmp_path / "reads")), cache_dir=tmp_path)  # beside it is where it belongs


def test_a_dataset_in_the_stores_folder_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "Rooted-k" / "images"
    root.mkdir(parents=True)
    with pytest.raises(ValueError, match="lie one inside the other"):
        CachedDataset(Rooted(root, tmp_path / "reads"), cache_dir=tmp_path, key="k")


def as_user(uid: int, gid: int, function: Any) -> None:
    """Runs a function in a process of another user."""

    def run() -> None:
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
        os.umask(0o007)
        function()

    process = FORK.Process(target=run)
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.fixture
def other_users(tmp_path: Path) -> None:
    """Skips where this process cannot act for other users: it is not root, or root of a namespace without them."""
    (probe := tmp_path / "probe").touch()
    try:
        os.chown(probe, 4001, 4242)
    except OSError as error:
        pytest.skip(f"other users' files cannot be made here: {error}")
    probe.unlink()


@pytest.fixture
def open_path(tmp_path: Path) -> Path:
    """A folder that other users can reach."""
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and folder != Path("/"):
            folder.chmod(folder.stat().st_mode | stat.S_IXGRP | stat.S_IXOTH | stat.S_IRGRP | stat.S_IROTH)
    return tmp_path


@pytest.mark.usefixtures("other_users")
def test_a_group_shares_a_store(open_path: Path) -> None:
    """Two users of a group, umask 007: the second extends what the first has begun."""
    shared, reads = open_path / "shared", open_path / "reads"
    shared.mkdir()
    os.chown(shared, 0, 4242)
    shared.chmod(0o2770)
    reads.touch()
    reads.chmod(0o666)
    source = Source(LENGTH, reads)

    def begin() -> None:
        cached = CachedDataset(source, cache_dir=shared, check=0)
        cached.__getitems__(list(range(100)))
        cached.close()

    def go_on() -> None:
        cached = CachedDataset(source, cache_dir=shared, check=0)
        check(cached)
        assert cached.complete
        cached.close()

    as_user(4001, 4242, begin)
    as_user(4002, 4242, go_on)
    assert source.reads() == Counter(range(LENGTH))
    for path in shared.rglob("*"):
        status = path.stat()
        assert status.st_gid == 4242
        assert stat.S_IMODE(status.st_mode) & 0o777 == (0o770 if path.is_dir() else 0o660), path


@pytest.mark.usefixtures("other_users")
def test_a_complete_store_serves_another_user(open_path: Path) -> None:
    source = Source(LENGTH, open_path / "reads")
    (open_path / "reads").chmod(0o666)
    cached = filled(source, cache_dir=open_path / "cache")
    for path in (cached.path.parent, *cached.path.parent.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)

    def read() -> None:
        check(CachedDataset(source, cache_dir=open_path / "cache", check=0))
        check(CachedDataset.open(cached.path))

    as_user(4001, 4001, read)
    assert source.reads() == Counter(range(LENGTH))


@pytest.mark.usefixtures("other_users")
def test_a_strangers_folder_that_all_can_write_to(cache_dir: Path, source: Source) -> None:
    cached = filled(source)
    os.chown(cached.path, 4001, 4001)
    store._open_stores.clear()
    check(CachedDataset(source, check=0))  # somebody else's, whom nobody can help: as on a read-only mount
    cached.path.chmod(0o777)
    before = source.reads().total()
    with pytest.warns(CacheBypassWarning, match=r"uid 4001\) and everybody can write to it.*trust=True") as caught:
        check(CachedDataset(source, check=0))
    assert len(caught) == 1
    assert source.reads().total() == before + LENGTH
    with pytest.raises(torchcache.StoreUnavailableError, match="trust=True"):
        CachedDataset.open(cached.path)
    check(CachedDataset(source, check=0, trust=True))
    check(CachedDataset.open(cached.path, trust=True))
    assert source.reads().total() == before + LENGTH


def test_a_sample_larger_than_a_value_can_be(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """LMDB's limit is 4 GiB; tests/stress has one of that size."""
    monkeypatch.setattr(packing, "LARGEST_SAMPLE_BYTES", 10_000)
    source = Source(
        20, tmp_path / "reads", lambda i: torch.full((20_000 if i == 7 else 100 + i,), i, dtype=torch.uint8)
    )
    cached = CachedDataset(source, key="k", check=0)
    with pytest.warns(CacheBypassWarning, match=r"takes no sample of more than .* bytes: .*each epoch") as caught:
        for _ in range(2):
            assert_same(
                [x for batch in DataLoader(cached, 5, collate_fn=list) for x in batch],
                list(map(source.make, range(20))),
            )
    assert len(caught) == 1
    assert cached.stats.samples_cached == 19
    assert source.reads() == Counter([*range(20), 7])


LIMIT = """
import resource, sys, warnings
from pathlib import Path
import torch
from helpers import Source
from torchcache import CachedDataset
source = Source(64, Path(sys.argv[1]), lambda i: torch.full((250_000,), i, dtype=torch.uint8))
resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20,) * 2)
cached = CachedDataset(source, key="k")
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        assert [int(cached[i][-1]) for i in range(64)] == list(range(64))
print([str(warning.message) for warning in caught])
assert 0 < cached.stats.samples_cached < 64
cached.close()
"""


def test_a_limit_on_the_size_of_files(cache_dir: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMIT, str(tmp_path / "reads")]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("takes no more samples") == 1
    assert "Input/output error" in done.stdout  # which is what LMDB makes of it
    again = CachedDataset(Source(64, tmp_path / "reads", lambda i: None), key="k", check=0)
    assert int(again[0][-1]) == 0


DESCRIPTORS = """
import os, resource, sys, warnings
from pathlib import Path
from torch.utils.data import DataLoader
from helpers import Source, assert_same, image_and_label
from torchcache import CachedDataset
source = Source(20, Path(sys.argv[1]))
warnings.simplefilter("error")
warnings.filterwarnings("ignore", ".* lies on ")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
stores = [CachedDataset(source, key=f"k{i}", check=0) for i in range(30)]
for _ in range(2):
    for cached in stores:
        assert sum(len(y) for _, y in DataLoader(cached, 5, shuffle=True)) == 20
        assert_same(cached[7], image_and_label(7))
assert all(cached.complete for cached in stores)
loaders = [iter(DataLoader(cached, 5)) for cached in stores for _ in range(4)]
for loader in loaders:
    assert len(next(loader)[1]) == 5
print(len(os.listdir("/proc/self/fd")))
"""


def test_few_descriptors(cache_dir: Path, tmp_path: Path) -> None:
    """Thirty stores and a hundred loaders under ``ulimit -n 64``, without a warning."""
    command = [sys.executable, "-c", DESCRIPTORS, str(tmp_path / "reads")]
    subprocess.run(command, cwd=HERE, check=True)


def test_no_locks_on_this_file_system(cache_dir: Path, source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(CacheBypassWarning, match=r"No locks available.*read from the source") as caught:
        check(CachedDataset(source))
    assert len(caught) == 1


def test_a_batch_that_cannot_be_gathered_comes_from_the_source(cache_dir: Path, source: Source) -> None:
    """The index of a sealed store says that a sample lies where the file has ended long ago."""
    cached = filled(source, name="gather")
    for make in (DataLoader, torchcache.DataLoader):
        again = CachedDataset(source, name="gather", check=0)
        loader = make(again, batch_size=50)
        cache = again._connection.open()
        assert cache is not None
        table = cache.reader.only_table()
        assert table is not None
        table.columns[0] = table.columns[0] + (1 << 40)
        with pytest.warns(CacheBypassWarning, match=r"lies outside the file|ends at byte") as caught:
            batches = list(loader)
        assert len(caught) == 1
        assert_same(
            [image for images, _ in batches for image in images], [image_and_label(i)[0] for i in range(LENGTH)]
        )
        again.close()
    assert cached.path.exists()


def test_a_process_that_was_stopped_while_it_wrote(cache_dir: Path, source: Source) -> None:
    """It has the lock for writing and keeps it: others go on without the store, after ``claim_timeout_s``."""
    cached = CachedDataset(source, claim_timeout_s=0.2)
    cached.__getitems__(list(range(100)))
    assert not cached.complete  # which learns of what has been published
    with open(cached.path / "writer.lock") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.warns(CacheBypassWarning, match=r"for 0.2 s; it may be stopped.*100 of 200") as caught:
            check(cached)
        assert len(caught) == 1
        with pytest.warns(CacheBypassWarning, match=r"cannot be used.* for 0.2 s; it may be stopped"):
            assert cached.stats.hits == 100


@as_root
def test_a_store_in_the_lower_layer_of_an_overlay(tmp_path: Path, source: Source) -> None:
    """The first write copies its file up; a process that has it mapped must not go on with the old one."""
    lower, upper, work, merged = (tmp_path / name for name in ("lower", "upper", "work", "merged"))
    for folder in (lower, upper, work, merged):
        folder.mkdir()
    half = CachedDataset(source, cache_dir=lower, check=0)
    half.__getitems__(list(range(100)))
    half.close()
    options = f"lowerdir={lower},upperdir={upper},workdir={work}"
    done = subprocess.run(
        ["mount", "-t", "overlay", "-o", options, "overlay", str(merged)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"no overlay can be mounted here: {done.stderr!r}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", CacheFolderWarning)
            reading = CachedDataset(source, cache_dir=merged, check=0)
            assert_same(reading[5], image_and_label(5))

            def extend() -> None:
                other = CachedDataset(source, cache_dir=merged, check=0)
                check(other)
                other.close()

            process = FORK.Process(target=extend)
            process.start()
            process.join(60)
            assert process.exitcode == 0
            check(reading)
            reading.close()
        assert source.reads() == Counter(range(LENGTH))
        assert (upper / half.path.name / "data.mdb").exists()
    finally:
        subprocess.run(["umount", "-l", str(merged)], check=True)
