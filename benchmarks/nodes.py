"""Several nodes: what the exchange moves, and how fast.

First from the real samplers, for clusters of 2 to 1,024 nodes: the bytes that one node receives in a step, the source
reads of all epochs, the disk that each node needs; beside what it takes when every node reads and caches everything.
Then on this machine, with two processes: the exchange's rate against gloo's bare all_to_all of the same bytes, once
into the same tensor and once into a new one at each step, as batches are. The ratio to read is bare/exchange: the
median over the rounds, with the lowest and the highest.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import (
    Spread,
    add_run_options,
    announced_environment,
    clock,
    new_parser,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from torch.utils.data import Dataset, DistributedSampler

from torchcache import CachedDataset
from torchcache.distributed import ExchangeLoader
from torchcache.plan import order_of_all_ranks, servers_of
from torchcache.topology import Topology, owners_of

NODES = (2, 4, 8, 16, 64, 256, 1024)
STEPS = 3  # of the simulated epoch that are looked at
MEASURED_STEPS = 60  # of a measured epoch, whose beginning counts


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--samples", type=positive, default=1_281_167, metavar="N", help="simulated (%(default)s)")
    parser.add_argument("--sample-bytes", type=positive, default=150_528, metavar="N", help="default: %(default)s")
    parser.add_argument("--ranks-per-node", type=positive, default=8, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="a rank's (%(default)s)")
    parser.add_argument("--epochs", type=positive, default=90, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=positive, default=15, metavar="N", help="measured (%(default)s)")
    add_run_options(parser)
    return parser.parse_args()


def simulate(args: argparse.Namespace, nodes: int) -> dict[str, float]:
    """What a cluster moves, reads and keeps."""
    world = nodes * args.ranks_per_node
    topology = Topology(0, tuple([rank // args.ranks_per_node for rank in range(world)]))
    owners = owners_of(topology.parts(args.samples, seed=0), args.samples)
    order = order_of_all_ranks(DistributedSampler(range(args.samples), world, 0, seed=args.seed))
    wanted = order[:, : STEPS * args.batch_size]
    servers = servers_of(topology)[owners[wanted].long(), torch.arange(world)[:, None]]
    node_of_rank = torch.tensor(topology.node_of_rank)
    foreign = node_of_rank[servers] != node_of_rank[:, None]
    first = foreign[: args.ranks_per_node].sum().item() / (wanted.shape[1] / args.batch_size)
    return {
        "received_bytes_per_step": first * args.sample_bytes,
        "source_reads": args.samples,
        "source_reads_without": args.samples * nodes,
        "disk_bytes": args.samples / nodes * args.sample_bytes,
        "disk_bytes_without": args.samples * args.sample_bytes,
    }


class Images(Dataset[Any]):
    """Images of the size that was asked for: some in memory, again and again."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count = count
        self.pixels = torch.randint(256, (min(count, 256), nbytes), dtype=torch.uint8)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.pixels[index % len(self.pixels)], index


def measure(rank: int, args: argparse.Namespace, folder: Path) -> None:
    """One of two ranks, each a node: seconds a step of the exchange and of gloo alone, in turns."""
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    batch = args.batch_size
    source = Images(2 * MEASURED_STEPS * batch, args.sample_bytes)
    sampler = DistributedSampler(source, seed=args.seed)
    with CachedDataset(source, cache_dir=folder / f"node{rank}", key="images") as dataset:
        loader = ExchangeLoader(dataset, sampler, batch, num_nodes=2)
        steps = sum(1 for _ in loader)  # fills
        # Not torch.empty: reading pages that were never written is reading one page of zeros again and again.
        sent = torch.randint(256, (batch * args.sample_bytes,), dtype=torch.uint8)
        same = torch.zeros_like(sent)

        def bare() -> Iterator[Any]:
            for _ in range(steps):
                dist.all_to_all_single(same, sent)
                yield same

        def bare_new() -> Iterator[Any]:
            for _ in range(steps):
                new = torch.empty_like(sent)
                dist.all_to_all_single(new, sent)
                yield new

        contestants = {"bare": bare, "bare_new": bare_new, "exchange": loader.__iter__}
        seconds: dict[str, list[float]] = {name: [] for name in contestants}
        for _ in range(args.rounds):
            for name, batches in contestants.items():
                dist.barrier()
                start = clock()
                for _ in batches():
                    pass
                seconds[name].append((clock() - start) / steps)
        loader.close()
    if rank == 0:
        torch.save(seconds, folder / "seconds")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    """Simulates, measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    simulated = {nodes: simulate(args, nodes) for nodes in NODES if nodes * args.ranks_per_node <= args.samples}
    print(
        f"{args.samples:,} samples of {args.sample_bytes:,} bytes, {args.ranks_per_node} ranks a node, batches of "
        f"{args.batch_size} a rank; in brackets what it is when every node reads everything"
    )
    rows = [
        [
            f"{nodes:,}",
            f"{result['received_bytes_per_step'] / 1e6:.1f} [0]",
            f"{result['source_reads'] / 1e6:.2f} [{result['source_reads_without'] / 1e6:.2f}]",
            f"{result['disk_bytes'] / 1e9:.1f} [{result['disk_bytes_without'] / 1e9:.1f}]",
        ]
        for nodes, result in simulated.items()
    ]
    print("\n" + table(["nodes", "MB a node and step", "million source reads", "GB of disk a node"], rows) + "\n")

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with scratch_folder(args.cache_dir, "nodes") as folder:
        torch.multiprocessing.spawn(measure, (args, folder), nprocs=2)  # type: ignore[no-untyped-call]
        seconds = torch.load(folder / "seconds")
    rate = ratios(seconds["bare"], seconds["exchange"])
    rate_new = ratios(seconds["bare_new"], seconds["exchange"])
    bare = Spread.of([args.batch_size * args.sample_bytes / 2e9 / s for s in seconds["bare"]])
    print(
        f"gloo alone, two processes: {bare.median:.2f} GB/s each way; the exchange reaches {rate} of it, and of gloo's "
        f"into a new tensor each step {rate_new}"
    )
    write_json(args, facts, {"simulated": simulated, "seconds": seconds, "rate": rate, "rate_new": rate_new})
    return 0


if __name__ == "__main__":
    sys.exit(main())
