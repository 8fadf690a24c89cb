"""A dataset with an object a sample: the seconds and the requests of its epochs, with and without the cache.

The store is moto's S3 server on this machine's loopback. It answers as fast as this machine lets it; a real one takes
10 to 100 ms a request, which --latency-ms stands for. The server, the workers and this process share the cores, so
that the ratio of the seconds says more than they do. The requests are exact.
"""

from __future__ import annotations

import argparse
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from common import (
    add_run_options,
    environment,
    environment_line,
    epoch_seconds,
    new_parser,
    non_negative,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from s3_server import S3Server
from torch.utils.data import DataLoader

from torchcache import CachedDataset

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "object_store.py"
PRICED_EPOCHS = 10
PRICE = 0.0004  # USD for 1,000 GETs: AWS S3 Standard, us-east-1, in 2025


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--samples", type=positive, default=4096, metavar="N", help="default: %(default)s")
    parser.add_argument("--sample-bytes", type=positive, default=110_000, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, default=4, metavar="N", help="default: %(default)s")
    parser.add_argument("--epochs", type=positive, default=3, metavar="N", help="of each kind; default: %(default)s")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="added to each answer; default: %(default)s")
    parser.add_argument(
        "--price-per-1000", type=float, default=PRICE, metavar="PRICE", help="of requests; default: %(default)s (USD)"
    )
    add_run_options(parser)
    return parser.parse_args()


def measured(server: S3Server, loader: DataLoader[Any], epochs: int) -> list[dict[str, float]]:
    """Seconds and requests of each epoch."""
    result = []
    for _ in range(epochs):
        before = len(server.requests)
        seconds = epoch_seconds(loader)
        result.append({"seconds": seconds, "requests": len(server.requests) - before})
    return result


def run(args: argparse.Namespace, server: S3Server, folder: Path) -> dict[str, list[dict[str, float]]]:
    """The epochs of the dataset itself and of the cached one."""
    generator = np.random.default_rng(args.seed)
    for number in range(args.samples):
        server.put("bucket", f"train/{number:08}", generator.bytes(args.sample_bytes))
    source = runpy.run_path(str(EXAMPLE))["Objects"]("s3://bucket/train", server.storage_options)
    server.latency_s = args.latency_ms / 1000
    loading = {"batch_size": args.batch_size, "shuffle": True, "num_workers": args.workers}
    plain = measured(server, DataLoader(source, **loading), args.epochs)
    with CachedDataset(source, cache_dir=folder, check=0) as cached:  # a compared sample would be a request more
        return {"without": plain, "with": measured(server, DataLoader(cached, **loading), args.epochs + 1)}


def report(args: argparse.Namespace, runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Prints the epochs, and what ten of them cost."""
    rows = [
        [f"{kind} cache, epoch {number}", f"{epoch['seconds']:.2f}", f"{epoch['requests']:,}"]
        for kind, epochs in runs.items()
        for number, epoch in enumerate(epochs, 1)
    ]
    print(table(["", "seconds", "requests"], rows))
    warm = [epoch["seconds"] for epoch in runs["with"][1:]]
    ratio = ratios(warm, [epoch["seconds"] for epoch in runs["without"]])
    print(f"\na warm epoch by one without the cache: {ratio} {ratio.as_fraction()}".rstrip())
    requests = {
        kind: int(epochs[0]["requests"] + (PRICED_EPOCHS - 1) * epochs[-1]["requests"]) for kind, epochs in runs.items()
    }
    cost = {kind: count / 1000 * args.price_per_1000 for kind, count in requests.items()}
    for kind, count in requests.items():
        print(f"{PRICED_EPOCHS} epochs {kind} the cache: {count:,} requests, which cost {cost[kind]:.6f}")
    return {"runs": runs, "ratio": ratio, "requests_of_ten_epochs": requests, "cost_of_ten_epochs": cost}


def main() -> None:
    """Runs the benchmark."""
    args = options()
    args.samples = min(args.samples, args.limit or args.samples)
    facts = environment()
    print(environment_line(facts))
    print(
        f"store: {args.samples:,} objects of {args.sample_bytes:,} bytes, {args.latency_ms:g} ms added to each answer"
    )
    with scratch_folder(args.cache_dir, "objects") as folder, S3Server() as server:
        content = report(args, run(args, server, folder))
    write_json(args, facts, content)


if __name__ == "__main__":
    main()
