"""Workers, ranks and jobs on one store: every sample right, and read once."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import Source, assert_same, image_and_label, other_owner
from torch.utils.data import DataLoader

from torchcache import CachedDataset, fill
from torchcache.flatten import flatten_many
from torchcache.waiting import Activity, Waiting

LENGTH = 200
FORK = multiprocessing.get_context("fork")


class SlowSource(Source):
    """A source whose reads take a moment, so that processes meet in it."""

    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.001)  # the source's slowness, not a wait for anything
        return super().__getitem__(index)


def check_epoch(cached: CachedDataset, **options: Any) -> None:
    loader = DataLoader(cached, batch_size=16, shuffle=True, collate_fn=list, **options)
    samples = [sample for batch in loader for sample in batch]
    found = sorted(samples, key=lambda sample: sample[0][0, 0, 0].item())
    assert_same(found, [image_and_label(i) for i in range(len(cached))])


@pytest.mark.parametrize("num_workers", [1, 3, 8])
def test_forked_workers(cache_dir: Path, source: Source, num_workers: int) -> None:
    cached = CachedDataset(source)
    cached[0]  # the parent has the store open
    for _ in range(2):
        check_epoch(cached, num_workers=num_workers, multiprocessing_context="fork")
    assert cached.complete
    check_epoch(cached)
    assert source.reads() == Counter(range(LENGTH))


@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_other_start_methods(cache_dir: Path, source: Source, start_method: str) -> None:
    cached = CachedDataset(source)
    cached[0]
    check_epoch(cached, num_workers=2, multiprocessing_context=start_method)
    assert cached.complete
    assert source.reads() == Counter(range(LENGTH))


def test_persistent_workers_and_breaking_off(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    loader = DataLoader(cached, batch_size=8, shuffle=True, num_workers=2, persistent_workers=True)
    next(iter(loader))
    for _ in range(3):
        assert sum(len(y) for _, y in loader) == LENGTH
    assert source.reads() == Counter(range(LENGTH))


def _run_job(cached: CachedDataset, gate: Any, seed: int) -> None:
    torch.manual_seed(seed)
    gate.wait()
    check_epoch(cached)


def test_many_jobs_open_one_missing_folder(cache_dir: Path, tmp_path: Path) -> None:
    source = SlowSource(100, tmp_path / "reads")
    gate = FORK.Barrier(12)
    # One that comes when the others have ended would compare a sample: check=0.
    cached = [CachedDataset(source, check=0) for _ in range(12)]
    jobs = [FORK.Process(target=_run_job, args=(job, gate, seed)) for seed, job in enumerate(cached)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join(60)
    assert [job.exitcode for job in jobs] == [0] * 12
    assert source.reads() == Counter(range(100))
    assert CachedDataset(source).complete


def test_fork_at_any_moment(cache_dir: Path, source: Source) -> None:
    """By code that is not ours, while single samples wait to be published."""
    cached = CachedDataset(source)
    for i in range(40):
        assert_same(cached[i], image_and_label(i))
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                assert_same([cached[i], cached[i + 100]], [image_and_label(i), image_and_label(i + 100)])
                cached.close()
                status = 0
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0
        subprocess.run(["true"], check=True)
    assert cached.complete is False
    assert max(source.reads().values()) == 1
    with FORK.Pool(2) as pool:
        assert_same(pool.map(cached.__getitem__, range(LENGTH)), [image_and_label(i) for i in range(LENGTH)])
    check_epoch(cached)


# What would need more than one of PyTorch's threads: many samples, large ones, such as are not in order in memory.
THREADLESS = """
import os, sys
import numpy as np
import torch
import torchcache
from torchcache import CachedDataset

class Samples:
    def __init__(self, make, length):
        self.make, self.length = make, length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.make(index)

def small(i):
    return torch.from_numpy(np.full(6, i)), i

def large(i):
    return torch.from_numpy(np.full((512, 1024), i))

def turned(i):
    image, table = np.full((300, 200, 3), i), np.full((64, 2048), i)
    return torch.from_numpy(image).permute(2, 0, 1), torch.from_numpy(table)[:, ::2]

def mixed(i):
    return small(i) if i % 2 else small(i)[0]

def use(make, length):
    source = Samples(make, length)
    for _ in range(2):
        with CachedDataset(source, key=make.__name__) as cached:
            cached.__getitems__(list(range(length // 2)))
        with CachedDataset(source, key=make.__name__) as cached:
            cached.fill(progress=False)
            cached.__getitems__(list(range(length)))
            for loader in (torch.utils.data.DataLoader, torchcache.DataLoader):
                if make in (small, large):  # the others PyTorch stacks itself
                    batch = next(iter(loader(cached, length)))
                    first = batch if make is large else batch[0]
                    assert first.reshape(length, -1).numpy()[:, 0].tolist() == list(range(length))

torch.set_num_threads(2)
torch.ones(1 << 22).add_(1)  # from here on PyTorch has threads, which no child will have
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
torchcache.fingerprint([torch.zeros(100) + 1 for _ in range(2000)])
for make, length in ((small, 40_000), (mixed, 40_000), (large, 3), (turned, 3)):
    use(make, length)
"""


def test_a_forked_process_needs_no_threads_of_pytorch(cache_dir: Path) -> None:
    """In the child of a process that has used them, a call that would be spread over them never ends."""
    subprocess.run([sys.executable, "-c", THREADLESS], check=True, timeout=100)


FILL = """
import sys
from pathlib import Path
from torch.utils.data import DataLoader
from test_processes import SlowSource
from torchcache import CachedDataset
source = SlowSource(300, Path(sys.argv[1]))
cached = CachedDataset(source)
for batch in DataLoader(cached, batch_size=8, shuffle=True, num_workers=int(sys.argv[2])):
    print("batch", flush=True)
"""


# Imports beforehand decide in which order things are closed when the interpreter ends.
UNCLOSED = """
import {first}
import sys
from pathlib import Path
from helpers import Source
from torchcache import CachedDataset
cached = CachedDataset(Source(20, Path(sys.argv[1])), check=0)
for i in range(7):
    cached[i]
"""


@pytest.mark.parametrize("first", ["weakref; weakref.finalize(Exception, print).detach()", "multiprocessing.util"])
def test_a_script_that_closes_nothing_keeps_what_it_has_read(cache_dir: Path, tmp_path: Path, first: str) -> None:
    command = [sys.executable, "-W", "error", "-c", UNCLOSED.format(first=first), str(tmp_path / "reads")]
    done = subprocess.run(command, cwd=Path(__file__).parent, check=True, capture_output=True, text=True)
    assert done.stderr == ""
    source = Source(20, tmp_path / "reads")
    with CachedDataset(source, check=0) as cached:
        assert cached.stats.samples_cached == 7
        samples = [cached[i] for i in range(20)]
    assert_same(samples, [image_and_label(i) for i in range(20)])
    assert source.reads() == Counter(range(20))


def start_filling(reads: Path, num_workers: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", FILL, str(reads), str(num_workers)],
        cwd=Path(__file__).parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@pytest.mark.parametrize("num_workers", [0, 2])
def test_killed_and_restarted(cache_dir: Path, tmp_path: Path, num_workers: int) -> None:
    """SIGKILL in mid-fill: what was published is kept, the rest is read again, nothing is cleaned by hand."""
    reads = tmp_path / "reads"
    for killed_after in (1, 4, 9):
        with start_filling(reads, num_workers) as process:
            assert process.stdout is not None
            for _ in range(killed_after):
                assert process.stdout.readline() == b"batch\n"
            os.killpg(process.pid, signal.SIGKILL)
            process.stdout.read()  # to the end: every process of the group that could still hold a lock is gone
    source = SlowSource(300, reads)
    cached = CachedDataset(source)
    check_epoch(cached)
    assert cached.complete
    counts = source.reads()
    assert sorted(counts) == list(range(300))
    assert sum(counts.values()) <= 300 + 3 * 8 * max(num_workers, 1) * 7  # what the dead had in hand and in the queue
    cached.close()
    assert list((cached.path / "owners").iterdir()) == []


def test_claims_of_a_dead_owner_are_taken_over(cache_dir: Path, source: Source) -> None:
    cached = CachedDataset(source)
    cached[0]
    cached.close()
    cached[1]
    dead = other_owner(cached, [5, 6])
    dead.forget()  # its lock is released, and its file stays
    assert_same(cached[5], image_and_label(5))
    check_epoch(cached)
    assert source.reads() == Counter(range(LENGTH))


def test_a_stopped_owner_is_overtaken(cache_dir: Path, source: Source) -> None:
    """As if it were stopped by SIGSTOP: its lock is held, and it publishes nothing."""
    cached = CachedDataset(source, claim_timeout_s=0.2)
    cached[0]
    stopped = other_owner(cached, [5, 6])
    started = time.monotonic()
    assert_same(cached[5], image_and_label(5))
    assert time.monotonic() - started >= 0.2
    stopped.release()


def test_a_late_owner_publishes_nothing_twice(cache_dir: Path, source: Source) -> None:
    """Two processes have read one sample: it is stored once, and the second read is counted."""
    slow, fast = CachedDataset(source), CachedDataset(source)
    for cached in (slow, fast):
        cached[0]
    assert slow._connection._cache is not None
    assert fast._connection._cache is not None
    slow._connection._cache.filler.flush()
    late = flatten_many([7, 8], [image_and_label(7), image_and_label(8)])
    assert_same(fast.__getitems__([7]), [image_and_label(7)])
    fast._connection._cache.filler.flush()
    with slow._connection._cache.filler._lock:
        slow._connection._cache.filler._publish(late, fill.Counters(source_reads=2))
    assert slow.stats.samples_cached == 3
    assert slow.stats.duplicate_reads == 1
    assert_same([fast[7], fast[8]], [image_and_label(7), image_and_label(8)])


def test_claims_of_an_interrupted_call_are_forgotten(cache_dir: Path, source: Source) -> None:
    """Interrupted between the claim and the read, a process must not wait for itself."""
    cached = CachedDataset(source)
    cached[0]
    assert cached._connection._cache is not None
    filler = cached._connection._cache.filler
    filler._claim([5, 6], Waiting(filler._store, Activity(), 60))
    assert_same([cached[5], cached[6]], [image_and_label(5), image_and_label(6)])
    assert source.reads() == Counter([0, 5, 6])


class Failing(Source):
    """Sample 3 always fails, sample 4 the first time."""

    def __getitem__(self, index: Any) -> Any:
        first = index not in self.reads()
        sample = super().__getitem__(index)
        if index == 3 or (index == 4 and first):
            raise KeyError(f"sample {index}")
        return sample


@pytest.mark.parametrize("num_workers", [0, 1])
def test_errors_of_the_source(cache_dir: Path, tmp_path: Path, num_workers: int) -> None:
    source = Failing(8, tmp_path / "reads")
    cached = CachedDataset(source, key="k")
    for _ in range(2):
        with pytest.raises(KeyError, match="sample 3"):
            list(DataLoader(cached, batch_size=8, num_workers=num_workers))
    with pytest.raises(KeyError, match="sample 4"):
        cached[4]
    assert_same(cached[4], image_and_label(4))
    assert source.reads() == Counter({0: 1, 1: 1, 2: 1, 3: 2, 4: 2})
    for index in (0, 1, 2, 5, 6, 7):
        assert_same(cached[index], image_and_label(index))
    assert cached.stats.samples_cached == 7


class Batched(Source):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(Batched, self).__getitem__(i) for i in indices]

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError("asked one by one")


def test_batches_of_the_source_are_used(cache_dir: Path, tmp_path: Path) -> None:
    source = Batched(40, tmp_path / "reads")
    cached = CachedDataset(source, key="k")
    for _ in range(2):
        assert sum(len(y) for _, y in DataLoader(cached, batch_size=7, drop_last=True)) == 35
    assert set(source.reads().values()) == {1}


def test_worker_seeds_are_as_without_the_cache(cache_dir: Path, source: Source) -> None:
    def draws(dataset: Any) -> list[int]:
        torch.manual_seed(5)
        np.random.seed(5)
        loader = DataLoader(dataset, batch_size=16, num_workers=2, shuffle=True, collate_fn=_draw)
        return [value for batch in loader for value in batch] + [int(torch.randint(1 << 30, ())), np.random.randint(9)]

    cached = CachedDataset(source)
    assert draws(cached) == draws(source) == draws(cached)


def _draw(batch: list[Any]) -> list[int]:
    return [int(batch[0][1]), int(torch.randint(1 << 30, ())), int(np.random.randint(1 << 30))]
