"""``ExchangeLoader``: the full shuffle of ``DistributedSampler`` over caches that each hold a part of the data.

Every rank knows from the seed which samples every rank needs at every step; that is what makes ``DistributedSampler``
work. So nobody asks for anything: at each step a rank gathers from its own node's cache what that node keeps of
everybody's batch, and a collective call delivers it. docs/nodes.md has the picture.
"""

from __future__ import annotations

import copy
import datetime
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from torchcache import collate, memory
from torchcache.dataset import CachedDataset
from torchcache.delivery import Delivery
from torchcache.flatten import flatten_many
from torchcache.messages import NOTHING, Cached, Message, Read, Received, pack
from torchcache.plan import Plan, order_of_all_ranks, servers_of
from torchcache.schema import Schema
from torchcache.topology import find_topology, owners_of


class ExchangeLoader:
    """Batches of a ``CachedDataset`` whose nodes each keep a part of the data.

    The batches, and their order, are those of ``DataLoader(dataset, batch_size, sampler=sampler)`` on each rank, bit
    for bit. In the first epoch the node that keeps a sample reads it from the source: once in the whole cluster.

    All ranks must make the loader, iterate over it and break off at the same batch together. It has a process group of
    its own (gloo) and works a few batches ahead of training, in a thread.

    Args:
        dataset: the cache of this node. Its ``transform`` is applied here, by the rank that gets the sample.
        sampler: which samples, in which order.
        batch_size: samples a batch.
        drop_last: leave out the last batch if it is smaller.
        collate_fn: makes a batch of a list of samples; default PyTorch's ``default_collate``.
        prefetch: how many batches to work ahead, at least 1. The samples of two more are read by then.
        pin_memory: put the batches in pinned memory, where there is CUDA.
        timeout: after which a step that a rank does not come to is an error; default the process group's.
        node_rank: number of this process's node; default torchrun's, else from the host names.
        num_nodes: number of nodes, each with the same number of ranks; default as for ``node_rank``.

    Raises:
        TypeError: if the sampler is no ``DistributedSampler``: of any other it is not known what other ranks draw.

    Example:
        >>> sampler = DistributedSampler(dataset)
        >>> loader = ExchangeLoader(dataset, sampler, batch_size=64)
        >>> for epoch in range(10):
        ...     sampler.set_epoch(epoch)
        ...     for images, labels in loader: ...
    """

    def __init__(
        self,
        dataset: CachedDataset,
        sampler: DistributedSampler[Any],
        batch_size: int = 1,
        *,
        drop_last: bool = False,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        prefetch: int = 2,
        pin_memory: bool = False,
        timeout: datetime.timedelta | None = None,
        node_rank: int | None = None,
        num_nodes: int | None = None,
    ) -> None:
        if not isinstance(dataset, CachedDataset):
            raise TypeError(f"ExchangeLoader got a {type(dataset).__name__}; wrap it: CachedDataset(dataset)")
        if dataset.batch_transform is not None and collate_fn not in (None, default_collate):
            raise TypeError("batch_transform= works on what default_collate makes; call it in your collate_fn")
        if not isinstance(sampler, DistributedSampler):
            raise TypeError(f"ExchangeLoader needs a DistributedSampler, not a {type(sampler).__name__}")
        if batch_size < 1 or prefetch < 1:
            raise ValueError(f"batch_size={batch_size} and prefetch={prefetch} must be at least 1")
        self.dataset = dataset
        self.sampler = sampler
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.collate_fn = default_collate if collate_fn is None else collate_fn
        self.prefetch = prefetch
        self.pin_memory = pin_memory
        self.topology = find_topology(sampler.num_replicas, sampler.rank, node_rank, num_nodes)
        self._source = copy.copy(dataset)  # shares the store
        self._source.transform = self._source.batch_transform = None
        parts = self.topology.parts(len(dataset), seed=0)
        self._owner = owners_of(parts, len(dataset))
        self._servers = servers_of(self.topology)
        self._delivery = Delivery(dist.new_group(backend="gloo", timeout=timeout), self.topology.rank)
        weakref.finalize(self, self._delivery.close)  # when the interpreter ends, at the latest
        self._batches = 0  # that this epoch has given
        self._resume_at = 0

    def __len__(self) -> int:
        samples = self.sampler.num_samples
        return samples // self.batch_size if self.drop_last else math.ceil(samples / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._delivery.closed:
            raise ValueError("this ExchangeLoader is closed; make another")
        self._batches, self._resume_at = self._resume_at, 0
        order = order_of_all_ranks(self.sampler)
        plan = Plan(order, self.batch_size, self._owner, self._servers, self.topology.rank)
        steps = range(self._batches, len(self))
        worker = _Ahead(self._delivered(plan, steps), len(steps), self.prefetch)
        try:
            for batch in worker:
                self._batches += 1
                yield batch
            self._batches = 0
        finally:
            worker.stop()

    def state_dict(self) -> dict[str, int]:
        """Where the epoch stands, for ``load_state_dict``: the batches that training has got, none that wait."""
        return {"epoch": self.sampler.epoch, "batches": self._batches}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """The next iteration goes on where ``state_dict`` was called. To be called on every rank."""
        self.sampler.set_epoch(int(state["epoch"]))
        self._resume_at = int(state["batches"])

    def close(self) -> None:
        """Publishes what this rank has read, and ends the process group and its threads."""
        self._source.close()
        self._delivery.close()

    def _delivered(self, plan: Plan, steps: range) -> Iterator[Any]:
        """Serves everybody's batches of these steps, and gives ours."""

        def prepared(step: int) -> _Step:
            return self._prepared(plan, step) if step in steps else self._nothing()

        current, following = prepared(steps.start), prepared(steps.start + 1)
        self._delivery.announce(current.sizes)
        self._delivery.write(current.messages, current.failure)
        for step in steps:
            self._delivery.start(following.sizes)
            # While it is on its way:
            stack = self._stack(plan.count(step))
            stack.add(current.own)
            after = prepared(step + 2)
            self._delivery.write(following.messages, following.failure)
            received = self._delivery.finish()
            stack.add(received)
            yield self._collated(plan.count(step), stack, [*current.own, *received])
            current, following = following, after

    def _prepared(self, plan: Plan, step: int) -> _Step:
        """What this rank has for everybody's batch of a step."""
        indices, numbers, counts = plan.step(step)
        prepared = self._nothing()
        try:
            found = self._read(indices)
            first = 0
            for requester, count in enumerate(counts):
                last = first + count
                part = [piece.part(first, last, numbers) for piece in found] if count else []
                if requester == self.topology.rank:  # no need to send these
                    prepared.own.extend([piece.here() for piece in part if len(piece)])
                elif part:
                    prepared.messages[requester] = pack(part)
                first = last
        except BaseException as error:  # raised when every rank knows
            return self._nothing(error)
        return prepared

    def _nothing(self, failure: BaseException | None = None) -> _Step:
        return _Step([], [NOTHING] * self.topology.num_replicas, failure)

    def _read(self, indices: torch.Tensor) -> list[Cached] | list[Read]:
        """Some samples, numbered as they come: from the cache, or through it from the source."""
        if not len(indices):
            return []
        numbers = torch.arange(len(indices))
        cache = self._source._connection.begin()
        rows = None if cache is None else cache.reader.find(indices)
        if cache is not None and rows is not None:
            columns = rows.table.schema.columns
            if all(column.shape is not None and column.torch_dtype is not None for column in columns):
                self._source._connection.served.hits += len(indices)
                return [Cached(cache.reader, rows, numbers)]
        samples = self._source._serving.at(indices.tolist(), None)
        return [Read(flat) for flat in flatten_many(numbers.tolist(), samples)]

    def _stack(self, count: int) -> _Stack:
        whole = self.dataset.transform is None and self.collate_fn is default_collate
        return _Stack(count, whole)

    def _collated(self, count: int, stack: _Stack, groups: Sequence[Cached | Received]) -> Any:
        """Our batch of what all ranks, we among them, have sent us."""
        transform = self.dataset.transform
        batch = stack.batch()
        if batch is None:
            samples: list[Any] = [None] * count
            for group in groups:
                for number, sample in zip(group.numbers.tolist(), group.samples(), strict=True):
                    samples[number] = sample if transform is None else transform(sample)
            batch = self.collate_fn(samples)
        if self.dataset.batch_transform is not None:
            batch = self.dataset.batch_transform(batch)
        if self.pin_memory and torch.cuda.is_available():
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch


class _Ahead:
    """Makes batches in a thread, a few ahead of who iterates.

    How many are made depends on nothing but how many were taken: every one is a collective call, so all ranks, which
    break off at the same batch, must have made the same number by then.

    Args:
        batches: gives them.
        count: how many there are.
        prefetch: how many to make ahead.
    """

    def __init__(self, batches: Iterator[Any], count: int, prefetch: int) -> None:
        self._batches = batches
        self._count = count
        self._allowed = prefetch
        self._stopped = False
        self._changed = threading.Condition()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torchcache-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number in range(self._count):
            with self._changed:
                self._changed.wait_for(lambda: number < self._allowed or self._stopped)  # noqa: B023
                if number >= self._allowed:
                    return
            try:
                self._done.put((next(self._batches), None))
            except BaseException as error:  # for who iterates
                self._done.put((None, error))
                return

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            batch, error = self._done.get()
            if error is not None:
                raise error
            with self._changed:
                self._allowed += 1
                self._changed.notify()
            yield batch

    def stop(self) -> None:
        """Lets the thread make what it may still make, and waits for its end."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join()


def fill_part(
    dataset: CachedDataset,
    num_workers: int = 0,
    progress: bool = True,
    *,
    node_rank: int | None = None,
    num_nodes: int | None = None,
) -> None:
    """Reads what this node keeps for ``ExchangeLoader``; to be called on every rank. A node's ranks share the work.

    Args:
        dataset: the cache of this node.
        num_workers: processes of each rank that read.
        progress: show a progress bar, on a terminal and in a notebook.
        node_rank: as for ``ExchangeLoader``.
        num_nodes: as for ``ExchangeLoader``.
    """
    topology = find_topology(None, None, node_rank, num_nodes)
    dataset.fill(num_workers, progress, indices=topology.part(len(dataset), seed=0).tolist())


@dataclass(frozen=True)
class _Step:
    """What this rank has for a step.

    Attributes:
        own: those of its own batch that it serves itself.
        messages: the others', one for each rank.
        failure: why there is nothing of that.
    """

    own: list[Cached | Received]
    messages: list[Message]
    failure: BaseException | None = None

    @property
    def sizes(self) -> list[int]:
        """Of the messages, in bytes."""
        return [message.nbytes for message in self.messages]


class _Stack:
    """The batch that ``default_collate`` would make, put together as its samples come.

    Args:
        count: samples of the batch.
        whole: whether it is wanted at all.
    """

    def __init__(self, count: int, whole: bool) -> None:
        self._count = count
        self._whole = whole  # and whether it can be made of whole columns
        self._schema: Schema | None = None
        self._columns: list[torch.Tensor] = []

    def add(self, groups: Sequence[Cached | Received]) -> None:
        """Copies samples to their places."""
        for group in groups if self._whole else ():
            if self._schema is None:
                self._begin(group.schema)
            if not self._whole or group.schema != self._schema:
                self._whole = False
                return
            for c, column in enumerate(self._columns):
                if column.shape[1]:
                    group.copy_rows(c, column)

    def _begin(self, schema: Schema) -> None:
        self._schema = schema
        self._whole = collate.shortcut(schema) is not None
        if self._whole:
            strides = [column.stride for column in schema.columns]
            self._columns = [memory.empty((self._count, n), torch.uint8) for n in strides]

    def batch(self) -> Any:
        """The batch; ``None`` if it cannot be made of whole columns."""
        if not self._whole or self._schema is None:
            return None
        make = collate.shortcut(self._schema)
        assert make is not None
        rows, self._columns = self._columns, []  # from here on, whoever has the batch alone holds it
        columns = []
        for column, out in zip(self._schema.columns, rows, strict=True):
            assert column.shape is not None  # the shortcut is for such columns alone
            assert column.torch_dtype is not None
            columns.append(out.view(column.torch_dtype).view(self._count, *column.shape))
        return make(columns)
