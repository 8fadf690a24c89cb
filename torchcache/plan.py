"""Who sends which samples to whom, known to every rank from the sampler's seed."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from torchcache.topology import Topology


class Plan:
    """What one rank serves in an epoch, step by step.

    Args:
        order: for each rank its samples of the epoch, of shape ``(ranks, samples)``.
        batch_size: samples of each rank in a step.
        owner: for every sample the node that keeps it.
        servers: see ``servers_of``.
        rank: whose plan.
    """

    def __init__(
        self, order: torch.Tensor, batch_size: int, owner: torch.Tensor, servers: torch.Tensor, rank: int
    ) -> None:
        self._batch_size = batch_size
        self._samples = order.shape[1]
        parts = []
        for requester in torch.nonzero((servers == rank).any(0))[:, 0].tolist():
            ours = (servers[:, requester] == rank)[owner[order[requester]].long()]
            positions = torch.nonzero(ours)[:, 0]
            parts.append((torch.full_like(positions, requester), positions))
        requesters, positions = (torch.cat(part) for part in zip(*parts, strict=True))
        # By step, and within it as before: by requester and position.
        steps, found = torch.div(positions, batch_size, rounding_mode="floor").sort(stable=True)
        requesters, positions = requesters[found], positions[found]
        self._indices = order[requesters, positions]
        self._numbers = positions % batch_size
        count = -(-self._samples // batch_size)
        self._counts = torch.bincount(steps * len(order) + requesters, minlength=count * len(order)).view(count, -1)
        self._ends = [0, *self._counts.sum(1).cumsum(0).tolist()]

    def step(self, step: int) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """What this rank serves at a step: the samples, the place of each in its batch, and how many each rank gets."""
        part = slice(self._ends[step], self._ends[step + 1])
        return self._indices[part], self._numbers[part], self._counts[step].tolist()

    def count(self, step: int) -> int:
        """Samples in each rank's batch of a step."""
        return min(self._batch_size, self._samples - step * self._batch_size)


def servers_of(topology: Topology) -> torch.Tensor:
    """Who serves what: for each node that keeps a sample and each rank that wants it, the rank that sends it.

    One's own, where the node is one's own; else the one of the node that has the same place there, so that every rank
    has about the same to send.
    """
    local = torch.tensor(topology.local_rank_of)
    table = torch.stack([torch.tensor(ranks)[local % len(ranks)] for ranks in topology.ranks_of])
    everyone = torch.arange(topology.num_replicas)
    table[torch.tensor(topology.node_of_rank), everyone] = everyone
    return table


def order_of_all_ranks(sampler: DistributedSampler[Any]) -> torch.Tensor:
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
