"""Several nodes: one cache over all their disks, on ``torch.distributed``. docs/nodes.md explains it.

Not imported by ``import torchcache``, which needs no ``torch.distributed``.
"""

from torchcache.exchange import ExchangeLoader, fill_part
from torchcache.partitioned import PartitionedSampler
from torchcache.topology import Topology, find_topology

__all__ = ["ExchangeLoader", "PartitionedSampler", "Topology", "fill_part", "find_topology"]
