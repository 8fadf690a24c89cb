"""Opening a complete store in a new process: the time it takes, and the memory, for stores of different lengths.

For each length a store of small samples (24 bytes and a number) is filled. Then new processes, in turns, import
torchcache, open the store without its source and read one sample. Reported are milliseconds and private memory (what
``/proc/self/smaps_rollup`` counts as private) from the import to the open store, and to the first sample. Store and
program lie in the page cache. Opening reads nothing whose size depends on the number of samples, so that the times of
all lengths should be equal: their ratios are reported too.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from common import (
    Spread,
    add_run_options,
    announced_environment,
    new_parser,
    positive,
    ratios,
    scratch_folder,
    table,
    write_json,
)
from torch.utils.data import Dataset

from torchcache import CachedDataset, ahead

SAMPLES = (1000, 1_300_000, 10_000_000)  # the second is ImageNet's
BLOCK_SAMPLES = 20_000  # filled at a time

CHILD = """
import json, sys, time
from pathlib import Path
import torchcache

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private"))

before, start = private(), time.perf_counter()
ds = torchcache.CachedDataset.open(sys.argv[1])
opened = time.perf_counter() - start
memory, start = private() - before, time.perf_counter()
ds[len(ds) // 2]
print(json.dumps({"open_s": opened, "read_s": opened + time.perf_counter() - start, "open_bytes": memory}))
"""


def options() -> argparse.Namespace:
    """The command line."""
    parser = new_parser(__doc__)
    parser.add_argument("--samples", type=positive, nargs="+", default=SAMPLES, metavar="N", help="of each store")
    parser.add_argument("--rounds", type=positive, default=7, metavar="N", help="default: %(default)s")
    add_run_options(parser)
    return parser.parse_args()


class Small(Dataset[Any]):
    """Small samples, made many at a time."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: list[int]) -> list[tuple[torch.Tensor, int]]:
        rows = torch.tensor(indices)[:, None].expand(-1, 3).contiguous().view(torch.uint8)
        return list(zip(rows.unbind(), indices, strict=True))


def filled(samples: int, folder: Path) -> Path:
    """The folder of a complete store."""
    ahead.BATCH_SIZE = BLOCK_SAMPLES
    with CachedDataset(Small(samples), cache_dir=folder, key=f"open-{samples}") as dataset:
        dataset.fill()
        return dataset.path


def opened(store: Path) -> dict[str, float]:
    """What a new process says of opening a store."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(store)], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def report(runs: dict[int, list[dict[str, float]]]) -> dict[str, Spread]:
    """Prints times and memory, then the ratios, which it returns."""
    columns = {"open_s": 1e3, "read_s": 1e3, "open_bytes": 1 / (1 << 20)}
    rows = [
        [f"{samples:,}", *[str(Spread.of([run[name] * scale for run in of])) for name, scale in columns.items()]]
        for samples, of in runs.items()
    ]
    print(table(["samples", "open, ms", "and a sample, ms", "private memory, MB"], rows))
    times = {samples: [run["open_s"] for run in of] for samples, of in runs.items()}
    first = next(iter(times))
    found = {f"{n:,} / {first:,} samples": ratios(times[n], times[first]) for n in times if n != first}
    print("\n" + table(["opening", "ratio [lowest - highest]"], [[name, str(ratio)] for name, ratio in found.items()]))
    return found


def main() -> int:
    """Measures and reports. Returns the exit status."""
    args = options()
    facts = announced_environment()
    with scratch_folder(args.cache_dir, "open") as folder:
        stores = {samples: filled(samples, folder) for samples in args.samples}
        for store in stores.values():
            opened(store)
        runs: dict[int, list[dict[str, float]]] = {samples: [] for samples in stores}
        order = list(stores)
        for number in range(args.rounds):
            first = number % len(order)
            for samples in order[first:] + order[:first]:
                runs[samples].append(opened(stores[samples]))
    write_json(args, facts, {"runs": runs, "ratios": report(runs)})
    return 0


if __name__ == "__main__":
    sys.exit(main())
