"""The data sets of the benchmarks: found, else downloaded, else drawn as a stand-in that says what it is."""

from __future__ import annotations

import argparse
import functools
import pickle
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from common import SCRATCH, write_atomic
from torch import nn
from torch.utils.data import Dataset

MNIST_MEAN, MNIST_STD = (0.1307,), (0.3081,)
MNIST_SIZES = {"train": 60_000, "t10k": 10_000}
CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR10_PER_FILE = 10_000  # five files for training, one for testing
STAND_IN_MARKER = "STAND-IN.txt"  # beside the IDX files: these are not the real MNIST
DOWNLOAD_TIMEOUT_S = 20  # a firewall that drops packets would otherwise hold each mirror for minutes
# The digits 0 to 9 as 5 x 7 pixels: a byte a row, the low five bits.
GLYPHS = bytes.fromhex(
    "0e11131519110e 040c040404040e 0e11010204081f 1f02040201110e 02060a121f0202"
    "1f101e0101110e 0608101e11110e 1f010204080808 0e11110e11110e 0e11110f01020c"
)


def add_data_options(parser: argparse.ArgumentParser) -> None:
    """The options of a benchmark that reads a data set from disk."""
    parser.add_argument("--data-dir", type=Path, default=SCRATCH / "data", help="default: %(default)s")
    parser.add_argument("--no-download", action="store_true", help="render a stand-in where the data is missing")


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


def _downloaded(name: str, data_dir: Path, download: Callable[[], Any]) -> bool:
    """Tries torchvision's download; says why where it fails."""
    print(f"{name} is not in {data_dir}: trying to download it")
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(DOWNLOAD_TIMEOUT_S)
    try:
        download()
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
        if download and _downloaded("MNIST", data_dir, lambda: _mnist()(str(data_dir), download=True)):
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


def announced_mnist(args: argparse.Namespace) -> str:
    """Prepares what ``add_data_options`` asks for, and prints and returns what it is."""
    data = prepare_mnist(args.data_dir, download=not args.no_download)
    print(f"data: {data}")
    return data


def _mnist() -> Any:
    from torchvision.datasets import MNIST  # here, because benchmarks without images need not load torchvision

    return MNIST


def load_mnist(data_dir: Path, *, train: bool) -> Dataset[Any]:
    """The usual MNIST data set: ``ToTensor`` and ``Normalize``, so float32 (1, 28, 28) images and int labels."""
    from torchvision import transforms

    steps = transforms.Compose([transforms.ToTensor(), transforms.Normalize(MNIST_MEAN, MNIST_STD)])
    dataset: Dataset[Any] = _mnist()(str(data_dir), train=train, transform=steps)
    return dataset


def _cifar10(*, stand_in: bool) -> Any:
    from torchvision.datasets import CIFAR10

    class StandIn(CIFAR10):
        """Reads files of CIFAR-10's format whose sums are others."""

        train_list: ClassVar = [[name, None] for name, _ in CIFAR10.train_list]
        test_list: ClassVar = [[name, None] for name, _ in CIFAR10.test_list]
        meta: ClassVar = {**CIFAR10.meta, "md5": None}

    return StandIn if stand_in else CIFAR10


def _cifar10_marker(data_dir: Path) -> Path:
    return data_dir / "cifar-10-batches-py" / STAND_IN_MARKER


def prepare_cifar10(data_dir: Path, *, download: bool) -> str:
    """The same for CIFAR-10's pickled batches."""
    marker = _cifar10_marker(data_dir)
    if not (marker.parent / "batches.meta").is_file():
        fetch = functools.partial(_cifar10(stand_in=False), str(data_dir), download=True)
        if not (download and _downloaded("CIFAR-10", data_dir, fetch)):
            _render_cifar10(marker.parent)
    if marker.is_file():
        return f"a STAND-IN for CIFAR-10, NOT the real one: drawn digits of the same number and size, in {data_dir}"
    return f"CIFAR-10 in {data_dir}"


def _render_cifar10(folder: Path) -> None:
    print(f"rendering a stand-in for CIFAR-10 in {folder}")
    write_atomic(
        folder / STAND_IN_MARKER, b"These files were drawn by torchcache's benchmarks. They are not CIFAR-10.\n"
    )
    for number, name in enumerate([*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"]):
        drawn, labels = render_digits(CIFAR10_PER_FILE, seed=number)
        colours = np.random.default_rng(number).uniform(0.4, 1.0, (len(drawn), 3, 1, 1))
        images = np.zeros((len(drawn), 3, 32, 32), np.uint8)
        images[:, :, 2:30, 2:30] = drawn[:, None] * colours
        content = {"data": images.reshape(len(drawn), -1), "labels": labels.tolist()}
        write_atomic(folder / name, pickle.dumps(content))
    # Written last: with it the data set is there.
    write_atomic(folder / "batches.meta", pickle.dumps({"label_names": [str(digit) for digit in range(10)]}))


def load_cifar10(data_dir: Path, *, train: bool, transform: Any) -> Dataset[Any]:
    """CIFAR-10 from its own pickled batches, or the stand-in."""
    stand_in = _cifar10_marker(data_dir).is_file()
    dataset: Dataset[Any] = _cifar10(stand_in=stand_in)(str(data_dir), train=train, transform=transform)
    return dataset


def load_image_folder(folder: Path, *, train: bool, transform: Any) -> Dataset[Any]:
    """Image files in folders by class, under ``train`` and ``test``, in an order that mixes the classes."""
    from torch.utils.data import Subset
    from torchvision.datasets import ImageFolder

    part = folder / ("train" if train else "test")
    if not part.is_dir():
        raise SystemExit(f"--image-folder {folder}: there is no {part}")
    dataset = ImageFolder(str(part), transform=transform)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))
    return Subset(dataset, order.tolist())
