"""``PartitionedSampler``: every node draws from its own part of the data."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data import Sampler

from torchcache.topology import find_topology


class PartitionedSampler(Sampler[int]):
    """Like ``DistributedSampler``, but each node always draws from its own part of the data.

    So each node's cache fills with its part alone, 1/num_nodes of the data, and the source is read once per sample over
    the whole cluster. The price is a restricted shuffle: a sample is only ever in a batch with samples of its own
    node's part. docs/nodes.md has what that does to training.

    All ranks get the same number of samples; where the data do not divide evenly, some are drawn twice (or, with
    ``drop_last``, left out of the epoch).

    Args:
        dataset: what is sampled; only its length is used.
        num_replicas: number of ranks; default ``torch.distributed``'s.
        rank: of this process; default ``torch.distributed``'s.
        shuffle: draw in another order each epoch (see ``set_epoch``), else in ascending order.
        seed: the same on every rank.
        drop_last: leave samples out, rather than draw some twice.
        node_rank: number of this process's node; default torchrun's, else from the host names.
        num_nodes: number of nodes, each with the same number of ranks; default as for ``node_rank``.
        repartition_every: give each node another part after so many epochs: better mixed, and read from the source
            again.

    Example:
        >>> sampler = PartitionedSampler(range(100), num_replicas=4, rank=0, num_nodes=2)
        >>> len(sampler)
        25
    """

    def __init__(
        self,
        dataset: Sized,
        num_replicas: int | None = None,
        rank: int | None = None,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        *,
        node_rank: int | None = None,
        num_nodes: int | None = None,
        repartition_every: int | None = None,
    ) -> None:
        if repartition_every is not None and repartition_every < 1:
            raise ValueError(f"repartition_every={repartition_every}: it is a number of epochs, at least 1")
        self.dataset = dataset
        self.topology = find_topology(num_replicas, rank, node_rank, num_nodes)
        self.num_replicas = self.topology.num_replicas
        self.rank = self.topology.rank
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.repartition_every = repartition_every
        self.epoch = 0
        length = len(dataset)
        self.num_samples = length // self.num_replicas if drop_last else math.ceil(length / self.num_replicas)
        self._part: tuple[int, torch.Tensor] | None = None  # of which partition, and what it gives this node
        self._yielded = 0
        self._resume_at = 0
        self.part()  # bad sizes are refused now

    def part(self) -> torch.Tensor:
        """The indices that this node keeps in the current epoch."""
        number = 0 if self.repartition_every is None else self.epoch // self.repartition_every
        if self._part is None or self._part[0] != number:
            self._part = number, self.topology.part(len(self.dataset), self.seed + number)
        return self._part[1]

    def __iter__(self) -> Iterator[int]:
        part = self.part()
        ranks = len(self.topology.ranks_of[self.topology.node])
        order = part
        if self.shuffle:
            order = part[torch.randperm(len(part), generator=torch.Generator().manual_seed(self.seed + self.epoch))]
        order = order.repeat(math.ceil(self.num_samples * ranks / len(order)))[: self.num_samples * ranks]
        mine = order[self.topology.local_rank_of[self.rank] :: ranks].tolist()
        self._yielded, self._resume_at = self._resume_at, 0
        for index in itertools.islice(mine, self._yielded, None):
            self._yielded += 1
            yield index

    def __len__(self) -> int:
        return self.num_samples

    def set_epoch(self, epoch: int) -> None:
        """Says which epoch comes next: the order depends on it. To be called before each epoch, on every rank."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Where the epoch stands, for ``load_state_dict``.

        A ``DataLoader`` with workers draws ahead of training; torchdata's ``StatefulDataLoader`` takes that into
        account.
        """
        return {"epoch": self.epoch, "yielded": self._yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration goes on where ``state_dict`` was called."""
        self.epoch = int(state["epoch"])
        self._resume_at = int(state["yielded"])
