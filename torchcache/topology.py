"""Which rank runs on which node, and which part of the data each node keeps."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist

# Not the order in which DistributedSampler draws with the same seed: all ranks would want one node's part at a time.
# Within 32 bits, of which torch's generator is made.
_PARTS_SEED = 0x7061_7274


@dataclass(frozen=True)
class Topology:
    """The ranks of a job and the nodes they run on.

    Attributes:
        rank: of this process.
        node_of_rank: for every rank the number of its node, counted from 0 without gaps.
    """

    rank: int
    node_of_rank: tuple[int, ...]

    @property
    def num_replicas(self) -> int:
        return len(self.node_of_rank)

    @property
    def num_nodes(self) -> int:
        return max(self.node_of_rank) + 1

    @property
    def node(self) -> int:
        """The node of this process."""
        return self.node_of_rank[self.rank]

    @cached_property
    def ranks_of(self) -> list[list[int]]:
        """For each node its ranks, in ascending order."""
        ranks: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for rank, node in enumerate(self.node_of_rank):
            ranks[node].append(rank)
        return ranks

    @cached_property
    def local_rank_of(self) -> list[int]:
        """For each rank its place among those of its node."""
        places = {rank: place for ranks in self.ranks_of for place, rank in enumerate(ranks)}
        return [places[rank] for rank in range(self.num_replicas)]

    def parts(self, length: int, seed: int) -> list[torch.Tensor]:
        """The indices that each node keeps: a fixed random part of the data, as large as its share of the ranks.

        Random, because data sets often lie in order of their classes.

        Args:
            length: number of samples.
            seed: the same on every rank.

        Raises:
            ValueError: if a node would get none.
        """
        shuffled = torch.randperm(length, generator=torch.Generator().manual_seed(_PARTS_SEED + seed))
        ends = [0, *itertools.accumulate([len(ranks) for ranks in self.ranks_of])]
        bounds = [length * end // self.num_replicas for end in ends]
        if any(first == last for first, last in itertools.pairwise(bounds)):
            raise ValueError(f"{length} samples cannot be split over {self.num_nodes} nodes: one would get none")
        return [shuffled[first:last] for first, last in itertools.pairwise(bounds)]

    def part(self, length: int, seed: int) -> torch.Tensor:
        """Of ``parts`` this node's, in ascending order."""
        return self.parts(length, seed)[self.node].sort().values


def find_topology(
    num_replicas: int | None = None,
    rank: int | None = None,
    node_rank: int | None = None,
    num_nodes: int | None = None,
) -> Topology:
    """Finds out which rank runs on which node.

    What is not given is taken from ``torch.distributed``; the nodes from torchrun's environment or, where that does not
    tell, from the host names, which all ranks then exchange once: in that case every rank must call this.

    Args:
        num_replicas: number of ranks.
        rank: of this process.
        node_rank: number of this process's node.
        num_nodes: number of nodes, each with the same number of ranks, which are numbered node by node.

    Raises:
        ValueError: if these contradict each other.
    """
    initialised = dist.is_available() and dist.is_initialized()
    if num_replicas is None:
        num_replicas = dist.get_world_size() if initialised else 1
    if rank is None:
        rank = dist.get_rank() if initialised else 0
    if not 0 <= rank < num_replicas:
        raise ValueError(f"rank {rank} is not one of {num_replicas} ranks (0 to {num_replicas - 1})")
    if num_nodes is not None:
        return _checked(Topology(rank, _even(num_replicas, num_nodes)), node_rank)
    if node_rank is not None:
        raise ValueError(f"node_rank={node_rank} needs num_nodes=: how many nodes there are")
    per_node = _torchrun_ranks_per_node(num_replicas, rank)
    if per_node:
        return Topology(rank, _even(num_replicas, num_replicas // per_node))
    if initialised and num_replicas == dist.get_world_size():
        hosts: list[str] = [""] * num_replicas
        dist.all_gather_object(hosts, socket.gethostname())
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        return Topology(rank, tuple([numbers[host] for host in hosts]))
    return Topology(rank, (0,) * num_replicas)


def torchrun_topology() -> Topology | None:
    """Which rank torchrun has started this process as, and on which node; ``None`` if it has not, or does not tell.

    Unlike ``find_topology`` it needs no process group.
    """
    try:
        world, own = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    except (KeyError, ValueError):
        return None
    per_node = _torchrun_ranks_per_node(world, own)
    return Topology(own, _even(world, world // per_node)) if per_node else None


def _even(num_replicas: int, num_nodes: int) -> tuple[int, ...]:
    if num_nodes < 1 or num_replicas % num_nodes:
        raise ValueError(f"{num_replicas} ranks cannot be spread evenly over num_nodes={num_nodes}")
    return tuple([rank // (num_replicas // num_nodes) for rank in range(num_replicas)])


def _checked(topology: Topology, node_rank: int | None) -> Topology:
    if node_rank is not None and node_rank != topology.node:
        raise ValueError(
            f"rank {topology.rank} of {topology.num_replicas} on {topology.num_nodes} nodes is on node "
            f"{topology.node}, not on node_rank={node_rank}: ranks must be numbered node by node"
        )
    return topology


def _torchrun_ranks_per_node(num_replicas: int, rank: int) -> int:
    """How many ranks torchrun has started on each node; 0 if it does not tell, or on some more than on others."""
    names = ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "GROUP_RANK")
    try:
        world, own, local, groups, group = [int(os.environ[name]) for name in names]
    except (KeyError, ValueError):
        return 0
    even = world == num_replicas and own == rank and local * groups == world and rank // local == group
    return local if even else 0


def owners_of(parts: Sequence[torch.Tensor], length: int) -> torch.Tensor:
    """For every sample the node that keeps it."""
    owners = torch.empty(length, dtype=torch.int16)
    for node, part in enumerate(parts):
        owners[part] = node
    return owners
