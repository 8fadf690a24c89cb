"""Programs that are interrupted at any moment; test_interrupts.py starts them. Arguments: scenario, folder."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

armed: list[bool] = []


def during_fork() -> None:
    if armed:
        armed.clear()
        os.kill(os.getpid(), signal.SIGINT)


os.register_at_fork(before=during_fork)  # before torchcache is imported: so it is called within its own hooks

from helpers import Source, assert_same, image_and_label  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from torchcache import CachedDataset, contents  # noqa: E402

LENGTH = 1200
scenario, folder = sys.argv[1], Path(sys.argv[2])
rng = random.Random(scenario)


def check(cached: CachedDataset, wanted: Any, found: Any) -> None:
    assert_same(found, image_and_label(wanted))


def until_done(step: Callable[[int], None], steps: int) -> int:
    """Takes steps, each again until it is done, and is interrupted as by Ctrl-C every few milliseconds."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    interrupts = number = 0
    while number < steps:
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0005, 0.006))
            while number < steps:
                step(number)
                number += 1
        except KeyboardInterrupt:
            interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    return interrupts


def ends_well(cached: CachedDataset) -> None:
    """All is right, also in the store that is left."""
    assert_same([cached[i] for i in range(LENGTH)], [image_and_label(i) for i in range(LENGTH)])
    cached.close()
    assert contents.verify(cached.path).samples == LENGTH
    assert cached.stats.source_reads <= cached.dataset.reads().total()


def items() -> None:
    cached = CachedDataset(Source(LENGTH, folder / "reads"), check=0)
    assert until_done(lambda i: check(cached, i, cached[i]), LENGTH) > 10
    ends_well(cached)


def batches() -> None:
    cached = CachedDataset(Source(LENGTH, folder / "reads"), check=0)

    def batch(number: int) -> None:
        indices = range(4 * number, 4 * number + 4)
        assert_same(list(cached.__getitems__(list(indices))), [image_and_label(i) for i in indices])

    assert until_done(batch, LENGTH // 4) > 5
    ends_well(cached)


def handlers() -> None:
    """What handlers do with the dataset happens between what the program does with it."""
    cached = CachedDataset(Source(LENGTH, folder / "reads"), check=0)
    uses: list[Callable[[], Any]] = [
        lambda: cached.stats,
        lambda: cached.complete,
        lambda: check(cached, 7, cached[7]),
        lambda: check(cached, calls % LENGTH, cached[calls % LENGTH]),
        lambda: cached.__getitems__([1, calls % LENGTH]),
    ]
    calls = 0

    def handler(number: int, frame: Any) -> None:
        nonlocal calls
        calls += 1
        uses[calls % len(uses)]()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.002, 0.0013)
    for i in range(LENGTH):
        check(cached, i, cached[i])
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert calls > 20
    ends_well(cached)
    assert cached.dataset.reads().total() <= LENGTH + calls  # a handler may want what is being read just then


def fork() -> None:
    """Ctrl-C while a process is forked arrives, and no lock stays taken."""
    cached = CachedDataset(Source(LENGTH, folder / "reads"), check=0)
    cached[0]
    armed.append(True)
    child, raised = -1, False
    ready, is_ready = os.pipe()
    try:
        child = os.fork()
        if not child:
            os.write(is_ready, b"x")
        signal.pause()  # the child waits for a signal of its own
    except KeyboardInterrupt:
        raised = True
    if not child:
        os._exit(7)
    assert raised
    os.read(ready, 1)
    os.kill(child, signal.SIGINT)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    other = threading.Thread(target=lambda: cached[1])
    other.start()
    other.join()
    ends_well(cached)


def forks() -> None:
    """Several threads fork at once."""
    cached = CachedDataset(Source(LENGTH, folder / "reads"), check=0)

    def often() -> None:
        for _ in range(30):
            child = os.fork()
            if not child:
                os._exit(0)
            os.waitpid(child, 0)

    threads = [threading.Thread(target=often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(LENGTH // 2):
        check(cached, i, cached[i])
    for thread in threads:
        thread.join()
    ends_well(cached)
    assert cached.dataset.reads().total() == LENGTH


def loaders() -> None:
    """Several threads start workers at once."""
    cached = CachedDataset(Source(64, folder / "reads"), check=0)
    failures: list[BaseException] = []

    def epochs() -> None:
        try:
            for _ in range(4):
                assert sum(len(labels) for _, labels in DataLoader(cached, 16, num_workers=1)) == 64
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=epochs) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert cached.dataset.reads().total() == 64


def descriptors() -> None:
    """Every descriptor is closed, as by a program that goes on as a daemon, and the numbers are other files' then."""
    cached = CachedDataset(Source(40, folder / "reads"), check=0)
    for i in range(20):
        check(cached, i, cached[i])
    assert cached.stats.samples_cached  # with what is needed for it open
    os.closerange(3, 256)
    others = folder / "others"
    others.write_bytes(b"\x11" * 4_000_000)
    opened = [open(others, "r+b") for _ in range(12)]  # noqa: SIM115
    for _ in range(2):
        for i in range(40):
            check(cached, i, cached[i])
    cached.close()
    del cached
    assert others.read_bytes() == b"\x11" * 4_000_000
    for file in opened:
        file.close()  # is still open


def output() -> None:
    """Standard output and error are closed: their numbers are not those of the store's files."""
    cached = CachedDataset(Source(40, folder / "reads"), check=0)
    check(cached, 3, cached[3])
    assert cached.stats.source_reads == 1
    names = {number: os.readlink(f"/proc/self/fd/{number}") for number in (1, 2)}
    (folder / "names").write_text(repr(names))


if __name__ == "__main__":
    globals()[scenario]()
