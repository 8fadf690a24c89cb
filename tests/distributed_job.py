"""One rank of the jobs that test_distributed.py starts. Arguments: scenario, folder, file of the rendezvous."""

from __future__ import annotations

import datetime
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import Source, assert_same, image_and_label
from torch.utils.data import DataLoader, DistributedSampler

from torchcache import CachedDataset
from torchcache.distributed import ExchangeLoader, fill_part

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def ragged(index: int) -> Any:
    return {"boxes": torch.arange(4.0 * (index % 5)).view(-1, 4) + index, "name": f"image {index}"}


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def half(sample: Any) -> Any:
    return sample[0] / 2, sample[1]


class Fails(Source):
    def __getitem__(self, index: Any) -> Any:
        if index == 13:
            raise OSError("the source is away")
        return super().__getitem__(index)


def check(source: Source, cached: CachedDataset, batch_size: int, reference: Any, **kwargs: Any) -> None:
    """Two epochs, the second one broken off and resumed, equal those of a plain loader over the bare dataset."""
    sampler = DistributedSampler(source)
    loader = ExchangeLoader(cached, sampler, batch_size, **kwargs)
    plain = DataLoader(reference, batch_size, sampler=sampler, collate_fn=kwargs.get("collate_fn"))
    assert len(loader) == len(plain)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        assert_same(list(loader), list(plain))
    iterator = iter(loader)
    first = [next(iterator) for _ in range(3)]
    state = loader.state_dict()
    iterator.close()
    loader.load_state_dict(state)
    assert_same(first + list(loader), list(plain))
    assert_same(list(loader), list(plain))
    loader.close()


def epochs(folder: Path) -> None:
    own = folder / f"reference-{RANK}"  # the plain loader's reads are not counted
    fixed = Source(203, folder / "fixed")
    with CachedDataset(fixed, check=0) as cached:
        check(fixed, cached, 8, Source(203, own))
    with CachedDataset(fixed, transform=half, check=0) as cached:
        check(fixed, cached, 8, [half(image_and_label(i)) for i in range(203)], prefetch=1)
    dist.barrier()  # the other rank of this node has published what it read
    with CachedDataset(fixed, check=0) as cached:
        assert cached.stats.samples_cached == (101, 102)[int(os.environ["GROUP_RANK"])]
    several = Source(50, folder / "ragged", ragged)
    with CachedDataset(several, check=0) as cached:
        check(several, cached, 4, Source(50, own, ragged), collate_fn=as_they_are)
        assert 0 < cached.stats.samples_cached < 50


def part(folder: Path) -> None:
    source = Source(90, folder / "source")
    with CachedDataset(source, check=0) as cached:
        fill_part(cached, progress=False)
    dist.barrier()
    with CachedDataset(source, check=0) as cached:
        assert cached.stats.samples_cached == 45
        list(ExchangeLoader(cached, DistributedSampler(source), 8))


def error(folder: Path) -> None:
    source = Fails(64, folder / "source")
    loader = ExchangeLoader(CachedDataset(source, check=0), DistributedSampler(source), 4)
    # As it is on the rank that reads the sample, with that rank's number on the others.
    with pytest.raises((OSError, RuntimeError), match=r"the source is away"):
        list(loader)


def until_an_error(folder: Path, at: int, happens: Callable[[], None], timeout_s: int) -> None:
    """Iterates until the others are gone, which something brings about at one of the batches."""
    source = Source(64, folder / "source")
    timeout = datetime.timedelta(seconds=timeout_s)
    loader = ExchangeLoader(CachedDataset(source, check=0), DistributedSampler(source), 2, timeout=timeout)
    try:
        for number, _ in enumerate(loader):
            if number == at:
                happens()
    except RuntimeError as failure:
        print(failure, flush=True)
        loader._source.close()
        os._exit(3)  # as after an error of any collective: the group cannot be closed in order


def death(folder: Path) -> None:
    until_an_error(folder, 3, lambda: os.kill(os.getpid(), signal.SIGKILL) if RANK == 1 else None, 20)


def cut(folder: Path) -> None:
    def wait_until_cut() -> None:
        if RANK == 0:
            (folder / "ready").write_bytes(b"")  # both are pipes: each waits for the other end
            (folder / "cut").read_bytes()

    until_an_error(folder, 3, wait_until_cut, 5)


def whole(folder: Path) -> None:
    source = Source(64, folder / "source")
    with CachedDataset(source, check=0) as cached:
        sampler = DistributedSampler(source)
        plain = DataLoader([image_and_label(i) for i in range(64)], 4, sampler=sampler)
        assert_same(list(ExchangeLoader(cached, sampler, 4)), list(plain))


def main() -> None:
    scenario, folder, rendezvous = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=RANK, world_size=WORLD)
    {"epochs": epochs, "part": part, "error": error, "death": death, "cut": cut, "whole": whole}[scenario](folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
