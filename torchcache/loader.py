"""``torchcache.DataLoader``: PyTorch's, with a shortcut for datasets that are wholly cached.

A stock ``DataLoader`` makes a list of Python ints of each batch, asks the dataset and collates. Where the dataset is
complete, indices stay tensors from the sampler to the gather, places are looked up for many batches at once, and
``num_workers`` threads do the gathering, which releases the interpreter's lock. Whatever is out of the ordinary is left
to the parent class.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.utils.data
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, Subset, default_collate
from torch.utils.data._utils.fetch import _MapDatasetFetcher
from torch.utils.data._utils.pin_memory import pin_memory

from torchcache import collate
from torchcache.dataset import CachedDataset
from torchcache.errors import StoreError
from torchcache.places import Table
from torchcache.reader import Reader, as_indices
from torchcache.serial import take
from torchcache.turns import Task, Turns

LOOK_UP_SAMPLES = 1 << 16  # places looked up at once; 8 bytes a sample and column
MOST_HANDED_OVER, HANDED_OVER_BYTES = 8, 2 << 20  # batches that a thread makes at a time, if they are small


class DataLoader(torch.utils.data.DataLoader[Any]):
    """A drop-in for ``torch.utils.data.DataLoader``: the same arguments, batches, order and generator states.

    It is faster where the dataset is a complete ``CachedDataset``, or ``Subset``s of one, without ``transform=``, and
    the batches are made by ``default_collate``; then ``num_workers`` is a number of threads, unless there is a
    ``batch_transform=``. They pay where they
    overlap with work on a device or with pages that must come from the disk; else 0 is fastest. Everything else runs
    as in the parent class, with worker processes.

    Example:
        >>> loader = DataLoader(CachedDataset(dataset), batch_size=64, shuffle=True)
    """

    def __iter__(self) -> Any:
        batches = self._cached_batches()
        return super().__iter__() if batches is None else batches

    def _cached_batches(self) -> Iterator[Any] | None:
        found = _cached(self.dataset)
        if found is None or self.collate_fn is not default_collate or not self._auto_collation:
            return None
        if self.worker_init_fn is not None and self.num_workers > 0:
            return None
        if not collate.is_default() or (self.pin_memory and not torch.cuda.is_available()):
            return None  # the parent knows what to say of it
        dataset, subset = found
        if dataset.batch_transform is not None and self.num_workers > 0:
            return None  # in threads, what it draws would come in any order
        cache = dataset._connection.open()
        if cache is None or not dataset.complete:
            return None
        reader = cache.reader
        table = reader.only_table()
        make = None if table is None else collate.shortcut(table.schema)
        if table is None or make is None or len(dataset) != table.count:  # it has got other samples since
            return None
        if dataset._connection.begin() is None:  # compared here only where no workers are forked afterwards
            return None
        if not (self.persistent_workers and self.num_workers > 0 and getattr(self, "_torchcache_seeded", False)):
            # Drawn by the parent's iterator, for workers that there are none of here.
            torch.empty((), dtype=torch.int64).random_(generator=self.generator)
            self._torchcache_seeded = True
        return _batches(self, dataset, _Gather(dataset, reader, table, make, subset))


class _Gather:
    """Makes batches of a complete store.

    Args:
        dataset: the dataset.
        reader: its reader.
        table: where its samples lie.
        make: makes a batch of its columns.
        subset: of the store's samples those that the loader's dataset has, in its order; ``None``: all.
    """

    def __init__(
        self,
        dataset: CachedDataset,
        reader: Reader,
        table: Table,
        make: Callable[[list[Any]], Any],
        subset: torch.Tensor | None,
    ) -> None:
        self._dataset = dataset
        self._reader = reader
        self._table = table
        self._make = make
        self._subset = subset
        self.length = table.count if subset is None else len(subset)
        self.sample_bytes = sum(column.stride for column in table.schema.columns)

    def look_up(self, indices: torch.Tensor) -> _Found:
        """Looks up where samples lie, given their indices in the loader's dataset."""
        rows = indices if self._subset is None else take(self._subset, indices)
        return _Found(rows, [self._table.look_up(c, rows) for c in range(len(self._table.schema.columns))])

    def announce(self, found: _Found, first: int, last: int) -> None:
        """Says that the batch of these samples is wanted soon."""
        self._reader.announce_places(self._table, [part[first:last] for part in found.places])

    def batch(self, found: _Found, first: int, last: int) -> Any:
        """The batch of some of the samples that were looked up."""
        try:
            columns = [self._reader.take(self._table, c, part[first:last]) for c, part in enumerate(found.places)]
        except StoreError as error:
            self._dataset._connection.bypass(error)
            batch = default_collate(self._dataset._serving.at(found.rows[first:last].tolist(), None))
        else:
            batch = self._make(columns)
        transform = self._dataset.batch_transform
        return batch if transform is None else transform(batch)


class _Found(NamedTuple):
    """Samples of a store, and for each column where they lie in it, or their values where these are small."""

    rows: torch.Tensor
    places: list[torch.Tensor]


def _batches(loader: DataLoader, dataset: CachedDataset, gather: _Gather) -> Iterator[Any]:
    """The batches of an epoch, by threads if there are workers."""
    tasks = _tasks(loader, dataset, gather)
    if loader.pin_memory:
        tasks = map(_pinned, tasks)
    if loader.num_workers == 0:
        return (task() for task in tasks)
    # Several to a thread at a time: handing over costs as much as gathering a small batch.
    few = min(MOST_HANDED_OVER, HANDED_OVER_BYTES // max(1, gather.sample_bytes * (loader.batch_size or 1)))
    size = max(few, loader.prefetch_factor or 2)
    groups = iter(lambda: list(itertools.islice(tasks, size)), [])
    threads = Turns(loader.num_workers, "torchcache-loader")
    # Drawn now, as by the parent, not when the first batch is asked for.
    for group in itertools.islice(groups, loader.num_workers):
        threads.give(group)
    return _in_order(threads, groups)


def _in_order(threads: Turns, groups: Iterator[list[Task]]) -> Iterator[Any]:
    try:
        while threads:
            batches, error = threads.take()
            for group in itertools.islice(groups, 1):
                threads.give(group)
            batches.reverse()
            while batches:
                yield batches.pop()  # which nobody else holds, so that its memory can be used again
            if error is not None:
                raise error
    finally:
        threads.close()


def _pinned(task: Task) -> Task:
    return lambda: pin_memory(task())  # type: ignore[no-untyped-call]


def _tasks(loader: DataLoader, dataset: CachedDataset, gather: _Gather) -> Iterator[Task]:
    """For each batch a function that makes it."""
    order = _known_order(loader, gather.length)
    if order is None:
        fetcher = _MapDatasetFetcher(loader.dataset, True, loader.collate_fn, loader.drop_last)
        for indices in loader.batch_sampler or ():
            wanted = as_indices(indices, gather.length)
            if wanted is None:  # negative ones, say: as without the shortcut
                yield _bound(fetcher.fetch, indices)
            else:
                dataset._connection.served.hits += len(wanted)
                found = gather.look_up(wanted)
                gather.announce(found, 0, len(wanted))
                yield _bound(gather.batch, found, 0, len(wanted))
        return
    size = loader.batch_size
    assert size is not None  # a known order has one
    for chunk in order:
        found = gather.look_up(chunk)
        gather.announce(found, 0, size)
        for first in range(0, len(chunk), size):
            last = min(first + size, len(chunk))
            dataset._connection.served.hits += last - first
            gather.announce(found, last, last + size)  # the disk works while this one is used
            yield _bound(gather.batch, found, first, last)


def _bound(function: Callable[..., Any], *arguments: Any) -> Task:
    return lambda: function(*arguments)


def _known_order(loader: DataLoader, length: int) -> Iterator[torch.Tensor] | None:
    """The indices of the epoch in pieces of whole batches, for the samplers that a loader makes by itself.

    They draw the same numbers from the same generator as the sampler would, at the same batch.
    """
    sampler, batches = loader.sampler, loader.batch_sampler
    if type(batches) is not BatchSampler or batches.sampler is not sampler:
        return None
    if type(sampler) is SequentialSampler and len(sampler.data_source) == length:
        return _pieces(torch.from_numpy(np.arange(length)), batches, None)
    if type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == length:
        return _shuffled(sampler, batches, length) if len(sampler.data_source) == length else None
    return None


def _shuffled(sampler: RandomSampler, batches: BatchSampler, length: int) -> Iterator[torch.Tensor]:
    generator = sampler.generator
    if generator is None:
        seed = int(torch.empty((), dtype=torch.int64).random_().item())
        generator = torch.Generator()
        generator.manual_seed(seed)
    yield from _pieces(torch.randperm(length, generator=generator), batches, sampler.generator)


def _pieces(order: torch.Tensor, batches: BatchSampler, generator: Any) -> Iterator[torch.Tensor]:
    size, length = batches.batch_size, len(order)
    whole = length // size * size
    step = max(1, LOOK_UP_SAMPLES // size) * size
    for first in range(0, whole, step):
        yield order[first : min(first + step, whole)]
    if generator is not None:
        # RandomSampler's, for the rest of num_samples, of which there is none.
        torch.randperm(length, generator=generator)
    if whole < length and not batches.drop_last:
        yield order[whole:]


def _cached(dataset: Any) -> tuple[CachedDataset, torch.Tensor | None] | None:
    """The cached dataset under any number of subsets, and which of its samples they leave, in which order."""
    subset: torch.Tensor | None = None
    while type(dataset) is Subset:
        indices = as_indices(dataset.indices, len(dataset.dataset))  # type: ignore[arg-type]
        if indices is None:
            return None
        subset = indices if subset is None else take(indices, subset)
        dataset = dataset.dataset
    if type(dataset) is not CachedDataset or dataset.transform is not None:
        return None
    return dataset, subset
