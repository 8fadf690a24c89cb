"""The benchmarks run, as programs of their own and at a tiny size. How fast they are is not looked at here."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT_S = 90
SIDE_BY_SIDE = 2  # most of a tiny run is importing torch
LENET = ("lenet_mnist", "--limit", 256, "--epochs", 2, "--device", "cpu", "--no-download")
READS = ("source_reads", "--limit", 256, "--epochs", 2, "--workers", 2, 1, "--batch-size", 16, "--no-download")
KILLS = ("kill_restart", "--kills", 1, "--samples", 600, "--batch-size", 16, "--workers", 1)
RESNET = ("resnet50_cifar10", "--limit", 16, "--epochs", 2, "--batch-size", 8, "--image-size", 32, "--device", "cpu")
NODES = ("nodes", "--samples", 4096, "--sample-bytes", 4096, "--batch-size", 8, "--rounds", 1)
SHUFFLES = ("partitioned_shuffle", "--limit", 512, "--epochs", 1, "--seeds", 1, "--nodes", 2, "--no-download")
OBJECTS = ("object_store", "--samples", 64, "--sample-bytes", 500, "--epochs", 1, "--workers", 2, "--latency-ms", 1)
COLD = ("cold", "--sizes-kb", 4, 64, "--file-mb", 2, "--turn-mb", 1, "--batch-size", 8, "--batches", 4, "--rounds", 1)
OPEN = ("open", "--samples", 100, 3000, "--rounds", 1)
FINGERPRINT = ("fingerprint", "--paths", 2000, "--rounds", 1, "--no-download")
ITEM = ("item", "--samples", 200, "--rounds", 1)
OVERHEAD = (
    "fill_overhead",
    "--source-us",
    0,
    50,
    "--sample-bytes",
    100,
    "--workers",
    0,
    1,
    "--samples",
    40,
    "--pairs",
    1,
)
PEERS = ("peers", "--data", "mnist", "images", "--limit", 256, "--rounds", 1, "--workers", 0, "--no-download")
BUILT_IN = ("torchcache", "torchcache, own loader", "uncached", "TensorDataset in RAM", "numpy.memmap", "FFCV")

Run = tuple[str, dict[str, Any]]


def run(folder: Path, script: str, *options: object) -> Run:
    """Runs a benchmark from the repository's root, where it must succeed. Returns its output and its numbers.

    Its cache is ``folder / "cache"``.
    """
    numbers = folder / "numbers.json"
    command = [sys.executable, f"benchmarks/{script}.py", *map(str, options), "--json", str(numbers)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {"CACHE_DIR": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | changes, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(numbers.read_text())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder for each program; the one of the comparison holds somebody else's store already."""
    names = (
        "data",
        "uncached",
        "compared",
        "reads",
        "kills",
        "nodes",
        "shuffles",
        "images",
        "resnet",
        "objects",
        "cold",
        "fingerprint",
        "open",
        "item",
        "overhead",
        "peers",
    )
    folders = {name: tmp_path_factory.mktemp(name) for name in names}
    foreign = folders["compared"] / "cache" / "mnist-train-0"
    foreign.mkdir(parents=True)
    (foreign / "data.mdb").write_text("another store")
    return folders


def images(folder: Path) -> Path:
    """JPEG files of two classes."""
    for part, count in (("train", 20), ("test", 4)):
        for number in range(count):
            path = folder / part / f"class{number % 2}" / f"{number}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (32, 32), (10 * number, 99, 0)).save(path)
    return folder


@pytest.fixture(scope="module")
def runs(folders: dict[str, Path]) -> Iterator[dict[str, Future[Run]]]:
    """All programs, started. The first renders a stand-in for MNIST, the others find it."""
    data = ("--data-dir", folders["data"])
    plot = ("--plot", folders["compared"] / "epochs.png")
    programs: dict[str, tuple[Any, ...]] = {
        "uncached": (*LENET, *data),
        "fingerprint": (*FINGERPRINT, *data),
        "kills": KILLS,
        "compared": (*LENET, "--compare", *data, *plot),
        "reads": (*READS, *data),
        "nodes": NODES,
        "objects": (*OBJECTS, "--price-per-1000", 0.5),
        "resnet": (*RESNET, "--compare", "--uint8", "--image-folder", images(folders["images"])),
        "shuffles": (*SHUFFLES, *data),
        "cold": (*COLD, "--plot", folders["cold"] / "rates.svg"),
        "open": OPEN,
        "item": ITEM,
        "overhead": OVERHEAD,
        "peers": (
            *PEERS,
            *data,
            "--peers",
            *BUILT_IN,
            "LMDB, a pickle a sample",
            "--plot",
            folders["peers"] / "peers.png",
        ),
    }
    with ThreadPoolExecutor(SIDE_BY_SIDE) as pool:
        yield {name: pool.submit(run, folders[name], *program) for name, program in programs.items()}


def test_lenet_without_a_cache(runs: dict[str, Future[Run]], folders: dict[str, Path]) -> None:
    output, numbers = runs["uncached"].result()
    assert "STAND-IN for MNIST, NOT the real one" in output
    assert "STAND-IN" in numbers["data"]
    epochs = numbers["runs"]["uncached"]["epochs"]
    assert [len(epoch["losses"]) for epoch in epochs] == [4, 4]
    assert [epoch["images"] for epoch in epochs] == [256, 256]
    assert not (folders["uncached"] / "cache").exists()


def test_lenet_compared(runs: dict[str, Future[Run]], folders: dict[str, Path]) -> None:
    output, numbers = runs["compared"].result()
    assert "losses: identical, bit for bit, in all 8 steps" in output
    assert numbers["comparison"]["first_different_step"] is None
    losses = {name: [epoch["losses"] for epoch in run["epochs"]] for name, run in numbers["runs"].items()}
    assert losses["cached"] == losses["uncached"]
    assert numbers["source_reads"] == {"uncached": 2 * (256 + 42), "cached": 256 + 42}
    assert (folders["compared"] / "epochs.png").read_bytes().startswith(b"\x89PNG")
    left = [path.name for path in (folders["compared"] / "cache").iterdir()]
    assert left == ["mnist-train-0"], "the comparison removes its own stores, and no others"


def test_resnet_compared(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["resnet"].result()
    assert "losses: identical, bit for bit, in all 4 steps" in output
    assert numbers["source_reads"] == {"uncached": 2 * (16 + 3), "cached": 16 + 3}


def test_the_stand_in_for_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import data

    monkeypatch.setattr(data, "CIFAR10_PER_FILE", 30)
    for _ in range(2):
        assert "STAND-IN for CIFAR-10, NOT the real one" in data.prepare_cifar10(tmp_path, download=False)
    train, test = (data.load_cifar10(tmp_path, train=part, transform=None) for part in (True, False))
    assert (len(train), len(test)) == (150, 30)
    assert train[0][0].size == (32, 32)
    assert {label for _, label in train} == set(range(10))


def test_source_reads(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["reads"].result()
    assert "each exactly once" in output
    assert numbers["source_reads"] == [256, 0]
    assert numbers["problems"] == []


def test_kill_and_restart(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["kills"].result()
    assert "every sample equals the source's" in output
    assert numbers["killed"] == 1
    assert numbers["problems"] == []


def test_nodes(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["nodes"].result()
    assert "the exchange reaches" in output
    two, four = numbers["simulated"]["2"], numbers["simulated"]["4"]
    assert two["disk_bytes"] == 2 * four["disk_bytes"]
    assert 0 < two["received_bytes_per_step"] < four["received_bytes_per_step"] < 8 * 8 * 4096


def test_the_partitioned_shuffle(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["shuffles"].result()
    assert "2 nodes of one rank" in output
    assert {name: len(values) for name, values in numbers["accuracy"].items()} == {"global": 1, "partitioned": 1}


def test_object_store(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["objects"].result()
    requests = {kind: [epoch["requests"] for epoch in epochs] for kind, epochs in numbers["runs"].items()}
    assert requests == {"without": [64], "with": [64, 0]}
    assert numbers["cost_of_ten_epochs"] == {"without": 0.32, "with": 0.032}
    assert "10 epochs with the cache: 64 requests, which cost 0.032000" in output


def test_cold_pages(runs: dict[str, Future[Run]], folders: dict[str, Path]) -> None:
    output, numbers = runs["cold"].result()
    assert "around a page fault" in output
    assert set(numbers["sizes"]) == {"4 KB", "64 KB"}
    for size in numbers["sizes"].values():
        assert {"map", "read-ahead", "pread", "sequential"} < set(size["seconds"])
    assert not list((folders["cold"] / "cache").iterdir())
    assert "read-ahead, next" in (folders["cold"] / "rates.svg").read_text()


def test_opening(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["open"].result()
    assert "3,000 / 100 samples" in output
    assert {name: len(times) for name, times in numbers["runs"].items()} == {"100": 1, "3000": 1}


def test_the_fingerprint(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["fingerprint"].result()
    assert "2,000 paths" in output
    assert len(set(numbers["keys"].values())) == len(numbers["seconds"]) == 4


def test_item_by_item(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["item"].result()
    assert "ds[i] / row of a tensor, copied" in output
    assert all(len(times) == 1 and times[0] > 0 for times in numbers["microseconds"].values())


def test_fill_overhead(runs: dict[str, Future[Run]]) -> None:
    output, numbers = runs["overhead"].result()
    assert "overhead, µs a sample" in output
    cells = {(case["source_us"], case["workers"], case["mode"]) for case in numbers["cases"]}
    assert cells == {(us, workers, mode) for us in (0, 50) for workers in (0, 1) for mode in ("batch", "item")}


def test_peers(runs: dict[str, Future[Run]], folders: dict[str, Path]) -> None:
    """A library that is not installed is named with the reason."""
    output, numbers = runs["peers"].result()
    assert (folders["peers"] / "peers.png").read_bytes().startswith(b"\x89PNG")
    workloads = numbers["workloads"]
    for workload in ("mnist-64-0", "mnist-256-0", "images-64-0"):
        assert {*BUILT_IN, "floor: index_select"} - {"FFCV"} <= set(workloads[workload]["ratios"])
    if importlib.util.find_spec("ffcv") is None:
        assert "not compared: FFCV: ModuleNotFoundError" in output
        assert "FFCV" in workloads["images"]["failed"]
