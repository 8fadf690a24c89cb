"""``ExchangeLoader``: the full shuffle of ``DistributedSampler`` over caches that each hold a part of the data.

Every rank knows from the seed which samples every rank needs at every step; that is what makes ``DistributedSampler``
work. So nobody asks for anything: at each step a rank gathers from its own node's cache what that node keeps of
everybody's batch, and two collective calls (lengths, then bytes) deliver it. docs/nodes.md has the picture.
"""

from __future__ import annotations

import copy
import datetime
import functools
import math
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, default_collate
from torch.utils.data._utils.pin_memory import pin_memory

from torchcache import collate
from torchcache.dataset import CachedDataset
from torchcache.flatten import Flat, Uniform, flatten_many
from torchcache.messages import Message, Received, pack, unpack
from torchcache.topology import Topology, find_topology, owners_of


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
        prefetch: how many batches to work ahead, at least 1.
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
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._source = copy.copy(dataset)  # shares the store
        self._source.transform = None
        parts = self.topology.parts(len(dataset), seed=0)
        self._owner = owners_of(parts, len(dataset))
        self._server = _servers(self.topology)
        self._batches = 0  # that this epoch has given
        self._resume_at = 0

    def __len__(self) -> int:
        samples = self.sampler.num_samples
        return samples // self.batch_size if self.drop_last else math.ceil(samples / self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        self._batches, self._resume_at = self._resume_at, 0
        order = _order_of_all_ranks(self.sampler)
        steps = range(self._batches, len(self))
        worker = _Ahead(functools.partial(self._batch, order), steps, self.prefetch)
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
        """Closes the process group; collective."""
        dist.destroy_process_group(self._group)

    # -- one step ----------------------------------------------------------------------------------------

    def _batch(self, order: torch.Tensor, step: int) -> Any:
        """Serves everybody's batch of one step, and returns ours.

        Args:
            order: for each rank its samples of the epoch, of shape ``(ranks, samples)``.
            step: which batch.
        """
        wanted = order[:, step * self.batch_size : (step + 1) * self.batch_size]
        rank = self.topology.rank
        # (ranks, batch): who serves each sample of each rank's batch.
        servers = self._server[self._owner[wanted].long(), torch.arange(len(wanted))[:, None]]
        failure: BaseException | None = None
        messages: list[Message] = []
        try:
            for requester in range(len(wanted)):
                numbers = torch.nonzero(servers[requester] == rank)[:, 0]
                messages.append(pack(self._read(wanted[requester][numbers], numbers)))
        except BaseException as error:  # raised again when every rank knows
            failure = error
        return self._collated(wanted.shape[1], self._exchange(messages, failure))

    def _read(self, indices: torch.Tensor, numbers: torch.Tensor) -> list[Flat]:
        """Some samples, taken apart: from the cache, or through it from the source."""
        if not len(indices):
            return []
        cache = self._source._connect()
        rows = None if cache is None else cache.reader.find(indices)
        if cache is not None and rows is not None:
            schema = rows.table.schema
            if all(column.shape is not None and column.torch_dtype is not None for column in schema.columns):
                columns: list[Any] = [
                    Uniform(column.shape or (), _bytes(cache.reader.gather(rows, c)))
                    for c, column in enumerate(schema.columns)
                ]
                return [Flat(schema.spec, numbers.tolist(), columns)]
        return flatten_many(numbers.tolist(), self._source._samples(indices.tolist()))

    def _exchange(self, messages: Sequence[Message], failure: BaseException | None) -> list[Received]:
        """Sends each rank its message, and returns what the others have sent us.

        Raises:
            RuntimeError: if another rank could not read a sample; then all ranks raise.
        """
        ranks = self.topology.num_replicas
        if failure is None:
            sizes = torch.tensor([message.nbytes for message in messages])
            sent = np.empty(int(sizes.sum()), np.uint8)
            first = 0
            for message in messages:
                message.write_to(sent[first : first + message.nbytes])
                first += message.nbytes
        else:  # a negative length announces the reason in the place of samples
            reason = f"{type(failure).__name__}: {failure}".encode()[:1000]
            sizes = torch.full((ranks,), -len(reason))
            sent = np.frombuffer(reason * ranks, np.uint8).copy()
        lengths = torch.empty_like(sizes)
        dist.all_to_all_single(lengths, sizes, group=self._group)
        got = torch.empty(int(lengths.abs().sum()), dtype=torch.uint8)
        dist.all_to_all_single(
            got, torch.from_numpy(sent), lengths.abs().tolist(), sizes.abs().tolist(), group=self._group
        )
        if failure is not None:
            raise failure
        parts = got.split(lengths.abs().tolist())  # type: ignore[no-untyped-call]
        for other in torch.nonzero(lengths < 0)[:, 0].tolist():
            reason = parts[other].numpy().tobytes()
            raise RuntimeError(f"rank {other} could not read a sample of this step: {reason.decode(errors='replace')}")
        return [received for part in parts for received in unpack(part.numpy())]

    def _collated(self, count: int, groups: list[Received]) -> Any:
        """Our batch of what all ranks, we among them, have sent us."""
        transform = self.dataset.transform
        batch = _stacked(count, groups) if transform is None and self.collate_fn is default_collate else None
        if batch is None:
            samples: list[Any] = [None] * count
            for group in groups:
                for number, sample in zip(group.numbers.tolist(), group.samples(), strict=True):
                    samples[number] = sample if transform is None else transform(sample)
            batch = self.collate_fn(samples)
        if self.pin_memory and torch.cuda.is_available():
            batch = pin_memory(batch)  # type: ignore[no-untyped-call]
        return batch


class _Ahead:
    """Makes batches in a thread, a few ahead of who iterates.

    How many are made depends on nothing but how many were taken: every one is a collective call, so all ranks, which
    break off at the same batch, must have made the same number by then.

    Args:
        make: makes the batch of a step.
        steps: which steps.
        prefetch: how many to make ahead.
    """

    def __init__(self, make: Callable[[int], Any], steps: range, prefetch: int) -> None:
        self._make = make
        self._steps = steps
        self._allowed = prefetch
        self._stopped = False
        self._changed = threading.Condition()
        self._done: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="torchcache-exchange", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        for number, step in enumerate(self._steps):
            with self._changed:
                self._changed.wait_for(lambda: number < self._allowed or self._stopped)  # noqa: B023
                if number >= self._allowed:
                    return
            try:
                self._done.put((self._make(step), None))
            except BaseException as error:  # for who iterates
                self._done.put((None, error))
                return

    def __iter__(self) -> Iterator[Any]:
        for _ in self._steps:
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


def _bytes(column: torch.Tensor) -> np.ndarray[Any, Any]:
    """A gathered column as bytes, one row a sample."""
    return column.reshape(len(column), -1).view(torch.uint8).numpy()


def _stacked(count: int, groups: Sequence[Received]) -> Any:
    """The batch that ``default_collate`` would make, where whole columns can be put together; else ``None``."""
    schema = groups[0].schema
    make = collate.shortcut(schema)
    if make is None or any(group.schema != schema for group in groups):
        return None
    columns = []
    for c, column in enumerate(schema.columns):
        assert column.shape is not None  # the shortcut is for such columns alone
        assert column.torch_dtype is not None
        out = torch.empty((count, column.stride), dtype=torch.uint8)
        if column.stride:
            item = f"V{column.stride}"  # so that NumPy copies a whole row at once
            for group in groups:
                out.numpy().view(item)[group.numbers.numpy()] = group.rows(c).numpy().view(item)
        columns.append(out.view(column.torch_dtype).view(count, *column.shape))
    return make(columns)


def _servers(topology: Topology) -> torch.Tensor:
    """Who serves what: for each node that keeps a sample and each rank that wants it, the rank that sends it.

    One's own, where the node is one's own; else the one of the node that has the same place there, so that every rank
    has about the same to send.
    """
    table = torch.empty((topology.num_nodes, topology.num_replicas), dtype=torch.int64)
    for node in range(topology.num_nodes):
        ranks = topology.ranks_of(node)
        for requester in range(topology.num_replicas):
            own = topology.node_of_rank[requester] == node
            table[node, requester] = requester if own else ranks[topology.local_rank_of(requester) % len(ranks)]
    return table


def _order_of_all_ranks(sampler: DistributedSampler[Any]) -> torch.Tensor:
    """What every rank draws in this epoch, of shape ``(ranks, samples)``."""
    if type(sampler).__iter__ is not DistributedSampler.__iter__:
        return torch.stack([torch.tensor(list(_as_rank(sampler, rank))) for rank in range(sampler.num_replicas)])
    # One list for all, instead of one for each of perhaps a thousand ranks: a sampler of one replica draws them in the
    # order in which they are dealt out.
    everyone = _as_rank(sampler, 0)
    everyone.num_replicas, everyone.num_samples = 1, sampler.total_size
    return torch.tensor(list(everyone)).view(sampler.num_samples, sampler.num_replicas).T


def _as_rank(sampler: DistributedSampler[Any], rank: int) -> DistributedSampler[Any]:
    other = copy.copy(sampler)
    other.rank = rank
    return other
