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
from torchcache.delivery import Delivery
from torchcache.distributed import ExchangeLoader, fill_part
from torchcache.messages import LARGE_ROW_BYTES, NOTHING, Later, Message

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


def large(index: int) -> Any:
    """Rows just below and just above the size from which they are copied one by one."""
    below = torch.arange(LARGE_ROW_BYTES - 1) % 251 + index
    above = torch.arange(LARGE_ROW_BYTES // 4) + index
    return {"below": below.to(torch.uint8), "above": above.float(), "index": index}


def mixed(index: int) -> Any:
    """Of two schemas that ``default_collate`` puts together, but in the first batches of one."""
    return torch.full((40_000,), index), float(index) if index > 60 and index % 5 == 0 else index


def keep(folder: Path) -> None:
    """Whoever keeps batches, or only a view, an array or a storage of them, finds them as they were."""
    source = Source(130, folder / "source", large)
    reference = Source(130, folder / f"reference-{RANK}", large)
    with CachedDataset(source, check=0) as cached:
        sampler = DistributedSampler(source)
        loader = ExchangeLoader(cached, sampler, 16, prefetch=1)
        plain = DataLoader(reference, 16, sampler=sampler)
        kept: list[Callable[[], Any]] = []
        expected: list[Any] = []
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for number, (batch, same) in enumerate(zip(loader, plain, strict=True)):
                assert_same(batch, same)
                if number % 3 == 0:
                    continue  # its memory is used again
                above = batch["above"]
                array, storage = above.numpy(), above.untyped_storage()
                ways: list[Callable[[], Any]] = [
                    lambda view=above[-1, 5:]: view,
                    lambda array=array[-1, 5:]: torch.from_numpy(array),
                    lambda storage=storage: torch.empty(0).set_(storage).view(-1, LARGE_ROW_BYTES // 4)[-1, 5:],
                ]
                kept.append(ways[(epoch + number) % 3])
                expected.append(same["above"][-1, 5:].clone())
                del batch, above, array, storage, ways  # what is kept is all that holds the memory
        assert len(kept) >= 6
        assert all(torch.equal(kept(), same) for kept, same in zip(kept, expected, strict=True))
        sampler.set_epoch(0)
        assert_same(list(loader), list(plain))
        loader.close()


def some(folder: Path) -> None:
    """In the first epoch some ranks have all samples of a step in their cache, others none or a few."""
    source = Source(120, folder / "source", mixed)
    if int(os.environ["GROUP_RANK"]) == 1:
        with CachedDataset(source, check=0) as cached:
            fill_part(cached, progress=False, node_rank=1, num_nodes=2)
    elif RANK == 0:
        with CachedDataset(source, check=0) as cached:
            cached.fill(progress=False, indices=range(0, 120, 9))
    dist.barrier()
    with CachedDataset(source, check=0) as cached:
        check(source, cached, 6, Source(120, folder / f"reference-{RANK}", mixed))


def late(folder: Path) -> None:
    """A message whose size is known to all, and which then cannot be written."""

    def fails(out: torch.Tensor) -> None:
        raise OSError("the disk is away")

    delivery = Delivery(dist.new_group(), RANK)
    message = Message([Later(128, fails)], 128) if RANK == 1 else NOTHING
    delivery.announce([message.nbytes] * WORLD)
    delivery.write([message] * WORLD, None)
    delivery.start([0] * WORLD)
    own, others = r"^the disk is away$", r"^rank 1 could not read a sample of this step: OSError: the disk is away$"
    with pytest.raises(OSError if RANK == 1 else RuntimeError, match=own if RANK == 1 else others):
        delivery.finish()
    delivery.close()


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
        before = threads_of_gloo()
        loader = ExchangeLoader(cached, sampler, 4)
        assert_same(list(loader), list(plain))
        assert threads_of_gloo() > before
        loader.close()
        assert threads_of_gloo() == before  # though the loader lives
        loader.close()  # once more does nothing
        with pytest.raises(ValueError, match="closed"):
            next(iter(loader))


def threads_of_gloo() -> int:
    return sum(path.read_text() == "pt_gloo_runloop\n" for path in Path("/proc/self/task").glob("*/comm"))


def main() -> None:
    scenario, folder, rendezvous = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=RANK, world_size=WORLD)
    {
        "epochs": epochs,
        "keep": keep,
        "some": some,
        "late": late,
        "part": part,
        "error": error,
        "death": death,
        "cut": cut,
        "whole": whole,
    }[scenario](folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
