"""What the benchmarks share: options, the environment line, timing, counting reads, tables and JSON.

A time by itself says little on a shared machine. So the contestants of a benchmark run in one process, in turns, and
what is reported is the ratio of each round: its median, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch
from torch.utils.data import DataLoader, Dataset, Subset

SCRATCH = Path(__file__).resolve().parent.parent / ".bench"  # ignored by git
clock = time.perf_counter


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def non_negative(text: str) -> int:
    """An argparse type: a whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {value}")
    return value


def new_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser whose help shows the module's docstring as it is written."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """The options every benchmark has."""
    parser.add_argument("--cache-dir", type=Path, help="where stores are made (default: $CACHE_DIR, else the user's)")
    parser.add_argument("--limit", type=positive, metavar="N", help="use only the first N samples")
    parser.add_argument("--seed", type=non_negative, default=0, help="of shuffles, weights and random moments")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every number there as well")


def _installed(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "none"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """What a reader must know of the machine to place a figure. A load well above 0 means that others are using it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpu = device is not None and device.type == "cuda"
    return {
        "cpu": _cpu_name(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        **{name: _installed(name) for name in ("torch", "torchvision", "numpy", "lmdb")},
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }


def environment_line(facts: Mapping[str, Any]) -> str:
    """The facts of :func:`environment` in one line."""
    return "environment: " + ", ".join(f"{name} {value}" for name, value in facts.items())


def announced_environment(device: torch.device | None = None) -> dict[str, Any]:
    """The facts of :func:`environment`, which it prints."""
    facts = environment(device)
    print(environment_line(facts))
    return facts


def seed_everything(seed: int) -> None:
    """Seeds the global generators of ``random``, NumPy and torch, and asks cuDNN for repeatable kernels."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a whole file or none of it: a temporary sibling, flushed to disk, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def length(dataset: Dataset[Any]) -> int:
    """``len`` of a map-style dataset, which torch's type leaves open."""
    return len(dataset)  # type: ignore[arg-type]


def limited(dataset: Dataset[Any], count: int | None) -> Dataset[Any]:
    """The first ``count`` samples; the dataset itself where that is all of it."""
    return dataset if count is None or count >= length(dataset) else Subset(dataset, range(count))


class ReadLog:
    """Every index that a source was asked for, by any process, in a file.

    One ``O_APPEND`` write of four bytes an index: the kernel keeps the writes of different processes apart, and what
    is written outlives a killed process. Pickles and forks as its path.
    """

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._file: int | None = None
        path.touch()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "_file": None}

    def record(self, indices: Sequence[int]) -> None:
        """Adds the indices in one write."""
        if self._file is None:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        os.write(self._file, np.asarray(indices, "<u4").tobytes())

    def total(self) -> int:
        """The number of reads so far."""
        return os.path.getsize(self.path) // 4

    def counts(self, samples: int) -> np.ndarray[Any, Any]:
        """How often each index was read: int64 (samples,)."""
        return np.bincount(np.fromfile(self.path, "<u4"), minlength=samples)


class CountedDataset(Dataset[Any]):
    """The dataset it is given, with every read written to a log.

    Has ``__getitems__``, which a DataLoader calls with a whole batch, so that the log costs a write a batch.
    """

    def __init__(self, dataset: Dataset[Any], log: ReadLog) -> None:
        self.dataset, self.log = dataset, log

    def __len__(self) -> int:
        return length(self.dataset)

    def __getitem__(self, index: int) -> Any:
        self.log.record([index])
        return self.dataset[index]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        self.log.record(indices)
        return [self.dataset[index] for index in indices]


@contextmanager
def scratch_folder(cache_dir: Path | None, purpose: str) -> Iterator[Path]:
    """A new folder inside the cache folder, removed afterwards. What else lies there is not touched."""
    root = cache_dir or os.environ.get("CACHE_DIR") or platformdirs.user_cache_dir("torchcache")
    Path(root).mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f"benchmark-{purpose}-", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@dataclass(frozen=True)
class Spread:
    """The median of some figures, and their lowest and highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.median:.4g} [{self.low:.4g} - {self.high:.4g}]"

    def as_fraction(self) -> str:
        """The median of a ratio below 1 as 1/n; empty for others."""
        return f"1/{1 / self.median:.1f}" if self.median < 1 else ""


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> Spread:
    """The ratios of figures that were measured in the same rounds."""
    return Spread.of([top / bottom for top, bottom in zip(numerators, denominators, strict=True)])


def alternate(contestants: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every round.

    All of them run once a round, each round begins with another one, and garbage is collected before each, so that
    none has the better place. A contestant returns the seconds it measured, so its preparations do not count.
    """
    names = list(contestants)
    times: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            gc.collect()
            times[name].append(contestants[name]())
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return times


def epoch_seconds(loader: DataLoader[Any], batches: int | None = None) -> float:
    """Seconds to draw an epoch from a loader, the start of its workers included; or only its first batches."""
    start = clock()
    for number, _ in enumerate(loader, 1):
        if number == batches:
            break
    return clock() - start


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text columns; the first left-aligned, the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        rest = [cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True)]
        return "  ".join([cells[0].ljust(widths[0]), *rest]).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, rows)])


def write_json(args: argparse.Namespace, facts: Mapping[str, Any], content: Mapping[str, Any]) -> None:
    """Writes the numbers where ``--json`` says, if it does, with the environment and the options that were set."""
    if args.json is None:
        return
    chosen = {name: value for name, value in vars(args).items() if value is not None}
    whole = {"benchmark": Path(sys.argv[0]).stem, "environment": facts, "options": chosen, **content}
    write_atomic(args.json, (json.dumps(whole, indent=1, default=_plain) + "\n").encode())
    print(f"numbers: {args.json}")


def _plain(value: Any) -> Any:
    """For JSON: paths as text, records and NumPy scalars as what they hold."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "__dataclass_fields__"):
        return asdict(value)
    return str(value)
