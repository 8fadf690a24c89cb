"""Large stores: private memory stays flat, the page cache is shared, and may be smaller than the store."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from helpers import Source

from torchcache import CacheBypassWarning, CachedDataset

FORK = multiprocessing.get_context("fork")
MIB = 1 << 20


class Numbers(Dataset[Any]):
    """Samples of four numbers and a label."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return torch.full((4,), float(index)), index % 10


class Images(Dataset[Any]):
    """Samples of a mebibyte each, of one value."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((MIB,), index % 251, dtype=torch.uint8)


def private_bytes(pid: int) -> int:
    """Memory that is this process's alone."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return sum(int(kib) << 10 for kib in re.findall(r"^Private_(?:Clean|Dirty): +(\d+) kB", rollup, re.MULTILINE))


def mapped_pss(pid: int, file: Path) -> int:
    """This process's share of the resident pages of a file, shared ones divided by those who have them mapped."""
    total, inside = 0, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = line.endswith(str(file))
        elif inside and line.startswith("Pss:"):
            total += int(line.split()[1]) << 10
    return total


@pytest.mark.timeout(1200)
def test_two_million_tiny_samples(tmp_path: Path, record: list[str]) -> None:
    length = 2_000_000
    cached = CachedDataset(Numbers(length), cache_dir=tmp_path, check=0)
    cached.fill(num_workers=2, progress=False)
    assert cached.complete
    loader = DataLoader(cached, batch_size=1024, shuffle=True, num_workers=4, persistent_workers=True)
    seen: list[list[int]] = []
    for _ in range(3):
        batches = iter(loader)
        workers: Any = batches
        total = 0.0
        for number, (values, labels) in enumerate(batches):
            assert bool((values[:, 0].long() % 10 == labels).all())
            total += float(values[:, 0].double().sum())
            if number in (len(loader) // 10, len(loader) - 10):
                seen.append([private_bytes(worker.pid) for worker in workers._workers])
        assert total == length * (length - 1) / 2
    growth = max(last - first for first, last in zip(seen[1], seen[-1], strict=True))
    assert growth < 16 * MIB
    record.append(
        f"2,000,000 samples, 4 workers, 3 epochs: private memory of a worker {max(seen[1]) / MIB:.0f} MiB after the "
        f"first epoch, {growth / MIB:+.1f} MiB by the end of the third"
    )


def read_all(path: Path, seed: int) -> None:
    with CachedDataset.open(path, copy=False) as cached:
        order = torch.randperm(len(cached), generator=torch.Generator().manual_seed(seed))
        for index in order.tolist():
            # By NumPy: a forked process must not use PyTorch's threads, which its parent may have started.
            values = cached[index].numpy()
            assert values.max() == values.min() == index % 251


def filled(length: int, cache_dir: Path) -> Path:
    with CachedDataset(Images(length), cache_dir=cache_dir, check=0) as cached:
        cached.fill(num_workers=2, progress=False)
        assert cached.complete
        return cached.path


@pytest.mark.timeout(600)
def test_eight_readers_share_their_pages(tmp_path: Path, record: list[str]) -> None:
    path = filled(2048, tmp_path)
    read, over = FORK.Barrier(9), FORK.Barrier(9)

    def reader(seed: int) -> None:
        cached = CachedDataset.open(path, copy=False)
        held = [cached[index] for index in range(len(cached))]  # the views keep the map
        assert all(int(value[::4096].max()) == index % 251 for index, value in enumerate(held))
        read.wait()
        over.wait()

    readers = [FORK.Process(target=reader, args=(seed,)) for seed in range(8)]
    for process in readers:
        process.start()
    read.wait()
    total = sum(mapped_pss(process.pid or 0, path / "data.mdb") for process in readers)
    over.wait()
    for process in readers:
        process.join()
    assert [process.exitcode for process in readers] == [0] * 8
    size = (path / "data.mdb").stat().st_size
    assert total < 1.1 * size
    record.append(f"8 readers of {size / MIB:,.0f} MiB: {total / size:.2f} copies resident")


def limited_group(nbytes: int) -> Path:
    """A control group with a limit on memory, the page cache included."""
    name = f"torchcache-{os.getpid()}"
    for root, limit in (("memory", "memory.limit_in_bytes"), ("", "memory.max")):
        group = Path("/sys/fs/cgroup") / root / name
        try:
            group.mkdir()
            (group / limit).write_text(str(nbytes))
            return group
        except OSError:
            if group.is_dir():
                group.rmdir()
    pytest.skip("no control group with a limit on memory can be made here")


@pytest.mark.timeout(900)
def test_a_store_larger_than_memory(tmp_path: Path, record: list[str]) -> None:
    """4 GiB in random order under a limit of 2 GiB. Their pages are dropped first: those of others cost nothing."""
    path = filled(4096, tmp_path)
    group = limited_group(2 << 30)

    def reader() -> None:
        (group / "cgroup.procs").write_text(str(os.getpid()))
        with open(path / "data.mdb", "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        read_all(path, 1)

    process = FORK.Process(target=reader)
    process.start()
    process.join()
    group.rmdir()
    assert process.exitcode == 0
    record.append("a store of 4 GiB read in full under a limit of 2 GiB")


@pytest.mark.timeout(600)
def test_a_sample_beyond_lmdbs_limit(tmp_path: Path, record: list[str]) -> None:
    source = Source(3, tmp_path / "reads", large_in_the_middle)
    cached = CachedDataset(source, cache_dir=tmp_path, key="k", check=0)
    with pytest.warns(CacheBypassWarning, match="takes no sample of more than"):
        for _ in range(2):
            assert [len(cached[i]) for i in range(3)] == [10, (1 << 32) + 10, 10]
    assert cached.stats.samples_cached == 2
    assert source.reads().total() == 4
    record.append("a sample of 4 GiB + 10 bytes: served, not cached, the others cached")


def large_in_the_middle(index: int) -> torch.Tensor:
    return torch.zeros((1 << 32) + 10 if index == 1 else 10, dtype=torch.uint8)
