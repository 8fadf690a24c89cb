"""What the benchmarks share: data, the environment line, timing, training, tables, JSON and plots.

A time by itself says little on a shared machine. So the contestants of a benchmark run in one process, in turns, and
what is reported is the ratio of each round: its median, with the lowest and the highest in brackets.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import platform
import random
import shutil
import socket
import statistics
import struct
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
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

SCRATCH = Path(__file__).resolve().parent.parent / ".bench"  # ignored by git
MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
MNIST_SIZES = {"train": 60_000, "t10k": 10_000}
STAND_IN_MARKER = "STAND-IN.txt"  # beside the IDX files: these are not the real MNIST
DOWNLOAD_TIMEOUT_S = 20  # a firewall that drops packets would otherwise hold each mirror for minutes
EVALUATION_BATCH = 256  # no gradients, so more fits; the same in every run
WARM_UP_STEPS = 10
# The digits 0 to 9 as 5 x 7 pixels: a byte a row, the low five bits.
GLYPHS = bytes.fromhex(
    "0e11131519110e 040c040404040e 0e11010204081f 1f02040201110e 02060a121f0202"
    "1f101e0101110e 0608101e11110e 1f010204080808 0e11110e11110e 0e11110f01020c"
)

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


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that reads a data set from disk."""
    parser.add_argument("--data-dir", type=Path, default=SCRATCH / "data", help="default: %(default)s")
    parser.add_argument("--no-download", action="store_true", help="render a stand-in where the data is missing")


def add_training_options(parser: argparse.ArgumentParser, *, epochs: int, batch_size: int) -> None:
    """The options of a benchmark that trains a model."""
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cache", action="store_true", help="read through CachedDataset (default: without a cache)")
    mode.add_argument("--compare", action="store_true", help="both, in turns, from an empty cache")
    parser.add_argument("--epochs", type=positive, default=epochs, metavar="N", help="default: %(default)s")
    parser.add_argument("--batch-size", type=positive, default=batch_size, metavar="N", help="default: %(default)s")
    parser.add_argument("--workers", type=non_negative, default=0, metavar="N", help="default: %(default)s")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="default: %(default)s")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a PNG of epoch times (needs matplotlib)")


def select_device(name: str) -> torch.device:
    """The device that ``--device`` names; ``auto`` is CUDA where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise SystemExit("--device cuda: torch finds no CUDA device here; use --device cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


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


def _idx(array: np.ndarray[Any, Any]) -> bytes:
    """Bytes of an IDX file (two zero bytes, type 8 = uint8, the number of dimensions, each dimension big-endian)."""
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape)
    return head + np.ascontiguousarray(array, np.uint8).tobytes()


def _glyph_images() -> torch.Tensor:
    """The ten digits, upright and centred: float32 (10, 1, 28, 28) between 0 and 1."""
    rows = np.frombuffer(GLYPHS, np.uint8).reshape(10, 7, 1)
    pixels = torch.from_numpy(np.unpackbits(rows, axis=2)[:, :, 3:].astype(np.float32))
    drawn = nn.functional.interpolate(pixels[:, None], size=(20, 14), mode="bilinear", align_corners=False)
    return nn.functional.pad(drawn, (7, 7, 4, 4))


def render_digits(count: int, *, seed: int) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Digits at random places, sizes and angles, with noise: uint8 images (count, 28, 28) and labels (count,).

    Drawn with a generator of its own, so that the global ones are left as they were.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> torch.Tensor:
        return torch.rand(count, generator=generator) * (high - low) + low

    labels = torch.randint(10, (count,), generator=generator)
    angle, shear = uniform(-0.25, 0.25), uniform(-0.2, 0.2)
    wide, high, brightness = uniform(0.85, 1.3), uniform(0.85, 1.3), uniform(0.65, 1.0)
    along = torch.stack([angle.cos() * wide, (shear - angle.sin()) * high, uniform(-0.2, 0.2)], 1)
    down = torch.stack([angle.sin() * wide, angle.cos() * high, uniform(-0.2, 0.2)], 1)
    placement, glyphs = torch.stack([along, down], 1), _glyph_images()
    images = torch.empty(count, 28, 28, dtype=torch.uint8)
    for part in torch.arange(count).split(5000):
        grid = nn.functional.affine_grid(placement[part], [len(part), 1, 28, 28], align_corners=False)
        drawn = nn.functional.grid_sample(glyphs[labels[part]], grid, align_corners=False)[:, 0]
        noise = torch.randn(drawn.shape, generator=generator) * 10
        images[part] = (drawn * brightness[part, None, None] * 255 + noise).clamp(0, 255).to(torch.uint8)
    return images.numpy(), labels.numpy()


def _download_mnist(data_dir: Path) -> bool:
    """Tries torchvision's download; says why where it fails."""
    from torchvision.datasets import MNIST  # here, because benchmarks without MNIST need not load torchvision

    print(f"MNIST is not in {data_dir}: trying to download it")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        MNIST(str(data_dir), download=True)
    except (OSError, RuntimeError) as error:
        print(f"the download failed: {' '.join(str(error).split())}")
        return False
    finally:
        socket.setdefaulttimeout(before)
    return True


def prepare_mnist(data_dir: Path, *, download: bool) -> str:
    """Sees to it that MNIST's IDX files are under ``data_dir``: found, else downloaded, else drawn.

    Returns:
        A line that says which of them it is. A stand-in is marked on disk, so that no later run takes it for MNIST.
    """
    raw = data_dir / "MNIST" / "raw"
    files = {part: (raw / f"{part}-images-idx3-ubyte", raw / f"{part}-labels-idx1-ubyte") for part in MNIST_SIZES}
    marker = raw / STAND_IN_MARKER
    if not all(path.is_file() for pair in files.values() for path in pair):
        if download and _download_mnist(data_dir):
            marker.unlink(missing_ok=True)
        else:
            print(f"rendering a stand-in for MNIST in {raw}")
            write_atomic(marker, b"These files were drawn by torchcache's benchmarks. They are not MNIST.\n")
            for number, (part, (images_path, labels_path)) in enumerate(files.items()):
                images, labels = render_digits(MNIST_SIZES[part], seed=number)
                write_atomic(images_path, _idx(images))
                write_atomic(labels_path, _idx(labels))
    if marker.is_file():
        return f"a STAND-IN for MNIST, NOT the real one: drawn digits of the same number and size, in {data_dir}"
    return f"MNIST in {data_dir}"


def load_mnist(data_dir: Path, *, train: bool) -> Dataset[Any]:
    """The usual MNIST data set: ``ToTensor`` and ``Normalize``, so float32 (1, 28, 28) images and int labels."""
    from torchvision import transforms  # as above
    from torchvision.datasets import MNIST

    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MNIST_MEAN, MNIST_STD)])
    dataset: Dataset[Any] = MNIST(str(data_dir), train=train, transform=steps)
    return dataset


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


class Waiting:
    """Iterates over a loader and adds up the seconds spent inside it: its start, and every ``next``."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self.loader, self.seconds = loader, 0.0

    def __iter__(self) -> Iterator[Any]:
        start = clock()
        iterator = iter(self.loader)
        self.seconds += clock() - start
        while True:
            start = clock()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            finally:
                self.seconds += clock() - start
            yield batch


@dataclass(frozen=True)
class Recipe:
    """All that decides what a training computes, apart from where its samples come from.

    ``prepare`` gets the inputs when they are on the device (a normalisation, say).
    """

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    batch_size: int
    workers: int
    device: torch.device
    seed: int
    prepare: Callable[[torch.Tensor], torch.Tensor] = lambda inputs: inputs


@dataclass(frozen=True)
class Epoch:
    """What one epoch took, and what it computed. ``losses`` holds the exact float32 loss of every step."""

    train_s: float
    train_wait_s: float
    test_s: float
    test_wait_s: float
    images: int
    accuracy: float
    losses: list[float]


class Training:
    """A training by a recipe, over sets that ``open_sets`` returns: (training set, test set).

    Every epoch starts from seeds of its own, so that several trainings can take turns in one process and each computes
    what it would compute alone. ``store_s`` is what opening and closing the sets took.
    """

    def __init__(self, recipe: Recipe, open_sets: Callable[[], tuple[Dataset[Any], Dataset[Any]]]) -> None:
        self.recipe, self.epochs = recipe, list[Epoch]()
        start = clock()
        self.sets = open_sets()
        self.store_s = clock() - start
        seed_everything(recipe.seed)
        self.model = recipe.model().to(recipe.device)
        self.optimizer = recipe.optimizer(self.model)
        self.train_loader = self._loader(self.sets[0], recipe.batch_size, shuffle=True)
        self.test_loader = self._loader(self.sets[1], EVALUATION_BATCH, shuffle=False)

    def _loader(self, dataset: Dataset[Any], batch_size: int, *, shuffle: bool) -> DataLoader[Any]:
        recipe = self.recipe
        return DataLoader(
            dataset,
            batch_size=batch_size,
            shuffle=shuffle,
            num_workers=recipe.workers,
            persistent_workers=recipe.workers > 0,
            pin_memory=recipe.device.type == "cuda",
            generator=torch.Generator(),
        )

    def _reseed(self, seed: int) -> None:
        seed_everything(seed)
        for loader in (self.train_loader, self.test_loader):
            loader.generator.manual_seed(seed)

    def _now(self) -> float:
        """The time when the device has done all it was given: kernels run on after the call that starts them."""
        if self.recipe.device.type == "cuda":
            torch.cuda.synchronize(self.recipe.device)
        return clock()

    def _to_device(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        # Pinned memory lets the copies run beside the computation; one stream orders them before their use.
        inputs, targets = (part.to(self.recipe.device, non_blocking=True) for part in batch)
        return self.recipe.prepare(inputs), targets

    def _train(self, steps: int | None = None) -> tuple[int, float, list[float]]:
        """Images, seconds of waiting and losses. Losses stay on the device until the end: reading one waits for it."""
        self.model.train()
        waiting, losses, images = Waiting(self.train_loader), list[torch.Tensor](), 0
        for batch in waiting:
            inputs, targets = self._to_device(batch)
            self.optimizer.zero_grad(set_to_none=True)
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            self.optimizer.step()
            losses.append(loss.detach())
            images += len(targets)
            if len(losses) == steps:
                break
        return images, waiting.seconds, torch.stack(losses).float().cpu().tolist()

    @torch.no_grad()
    def _test(self) -> tuple[float, float]:
        """Accuracy and seconds of waiting."""
        self.model.eval()
        waiting = Waiting(self.test_loader)
        right = torch.zeros((), dtype=torch.int64, device=self.recipe.device)
        for batch in waiting:
            inputs, targets = self._to_device(batch)
            right += (self.model(inputs).argmax(1) == targets).sum()
        return right.item() / length(self.sets[1]), waiting.seconds

    def run_epoch(self) -> Epoch:
        """Trains for an epoch, then tests."""
        self._reseed(self.recipe.seed + len(self.epochs))
        start = self._now()
        images, train_wait_s, losses = self._train()
        middle = self._now()
        accuracy, test_wait_s = self._test()
        end = self._now()
        epoch = Epoch(middle - start, train_wait_s, end - middle, test_wait_s, images, accuracy, losses)
        self.epochs.append(epoch)
        return epoch

    def warm_up(self) -> None:
        """A few steps for a model that is thrown away: kernels, thread pools and the CUDA context are set up once."""
        self._train(WARM_UP_STEPS)

    def close(self) -> None:
        """Ends the workers and closes the sets that can be closed."""
        del self.train_loader, self.test_loader
        start = clock()
        for dataset in self.sets:
            getattr(dataset, "close", lambda: None)()
        self.store_s += clock() - start

    def total(self, *fields: str, first: int = 0, last: int | None = None) -> float:
        """The sum of some fields over the epochs."""
        return float(sum(getattr(epoch, field) for epoch in self.epochs[first:last] for field in fields))

    def total_s(self) -> float:
        """Everything the user waits for: training, testing, opening and closing the sets."""
        return self.total("train_s", "test_s") + self.store_s


def run_in_turns(trainings: Mapping[str, Training], epochs: int) -> None:
    """Runs the epochs of several trainings in turns; every other epoch in the opposite order."""
    names = list(trainings)
    for number in range(epochs):
        for name in names if number % 2 == 0 else reversed(names):
            gc.collect()
            epoch = trainings[name].run_epoch()
            print(f"epoch {number + 1} of {epochs}, {name}: {epoch.train_s + epoch.test_s:.1f} s", file=sys.stderr)


def first_different_step(one: Training, other: Training) -> int | None:
    """The first step at which two trainings' losses differ in any bit, counted from 1; None where there is none."""
    bits = [np.array([loss for epoch in run.epochs for loss in epoch.losses], np.float32) for run in (one, other)]
    if len(bits[0]) != len(bits[1]):
        return min(len(bits[0]), len(bits[1])) + 1
    different = np.flatnonzero(bits[0].view(np.uint32) != bits[1].view(np.uint32))
    return int(different[0]) + 1 if len(different) else None


def comparison(cached: Training, uncached: Training) -> dict[str, Any]:
    """The ratios cached/uncached of one run, and whether both computed the same."""

    def ratio(*fields: str, first: int = 0, last: int | None = None) -> float | None:
        below = uncached.total(*fields, first=first, last=last)
        return cached.total(*fields, first=first, last=last) / below if below else None

    return {
        "total": cached.total_s() / uncached.total_s(),
        "first_epoch": ratio("train_s", "test_s", last=1),
        "later_epochs": ratio("train_s", "test_s", first=1),
        "waiting": ratio("train_wait_s", "test_wait_s"),
        "waiting_later_epochs": ratio("train_wait_s", "test_wait_s", first=1),
        "steps": sum(len(epoch.losses) for epoch in cached.epochs),
        "first_different_step": first_different_step(cached, uncached),
    }


def epoch_table(trainings: Mapping[str, Training]) -> str:
    """A row an epoch and training, and the totals."""
    header = ["epoch", "data", "seconds", "of it waiting", "images/s", "test seconds", "of it waiting", "accuracy"]
    rows, most = [], max(len(run.epochs) for run in trainings.values())
    for number in range(most):
        for name, run in trainings.items():
            e = run.epochs[number]
            times = [f"{e.train_s:.2f}", f"{e.train_wait_s:.2f}", f"{e.images / e.train_s:,.0f}"]
            rows.append([str(number + 1), name, *times, f"{e.test_s:.2f}", f"{e.test_wait_s:.2f}", f"{e.accuracy:.2%}"])
    for name, run in trainings.items():
        train_s, wait_s = run.total("train_s"), run.total("train_wait_s")
        times = [f"{train_s:.2f}", f"{wait_s:.2f}", f"{run.total('images') / train_s:,.0f}"]
        rows.append(["all", name, *times, f"{run.total('test_s'):.2f}", f"{run.total('test_wait_s'):.2f}", ""])
    return table(header, rows)


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


def require_matplotlib() -> None:
    """Ends the program at once, rather than after the training, where the plot cannot be drawn."""
    try:
        import matplotlib  # noqa: F401  optional: only --plot needs it
    except ImportError:
        raise SystemExit("--plot needs matplotlib: pip install 'torchcache-dataset[bench]'") from None


def plot_epochs(path: Path, trainings: Mapping[str, Training], title: str) -> None:
    """A PNG: for each epoch a bar for each training, the part spent waiting for data in a darker shade."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no display, and no global state
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    width = 0.8 / len(trainings)
    for position, (name, run) in enumerate(trainings.items()):
        at = np.arange(1, len(run.epochs) + 1) + (position - (len(trainings) - 1) / 2) * width
        whole = [epoch.train_s + epoch.test_s for epoch in run.epochs]
        waits = [epoch.train_wait_s + epoch.test_wait_s for epoch in run.epochs]
        axes.bar(at, whole, width, color=f"C{position}", alpha=0.45, label=name)
        axes.bar(at, waits, width, color=f"C{position}", label=f"{name}: waiting for data")
    axes.set(title=title, xlabel="epoch", ylabel="seconds (training and test)", xticks=range(1, len(whole) + 1))
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_atomic(path, image.getvalue())
    print(f"plot: {path}")
