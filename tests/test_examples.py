"""The examples, as processes, at a small size; and the claims of their output."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_torchvision_in_five_lines(cache_dir: Path) -> None:
    output = run("torchvision_in_five_lines.py", "--samples", "130")
    assert "epoch 2:" in output
    assert "260 hits, 130 source reads in all" in output
    assert "complete: True" in output


def test_augmentation_after_the_cache(cache_dir: Path) -> None:
    output = run("augmentation_after_the_cache.py", "--samples", "64")
    assert "the epochs differ: True; the source was read 64 times" in output


def test_ddp_one_node(cache_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    output = run("ddp_one_node.py", "--samples", "200", launcher=launcher)
    assert "2 ranks, 3 epochs, 200 samples" in output
    assert "source reads: 200, samples cached: 200" in output


def test_hyperparameter_search(cache_dir: Path) -> None:
    output = run("hyperparameter_search.py", "--samples", "256")
    assert output.count("loss") == 4
    assert "4 jobs; source reads: 256, of 256 samples" in output


def test_detection_ragged_targets(cache_dir: Path) -> None:
    output = run("detection_ragged_targets.py", "--samples", "50")
    assert output.count("images by number of boxes {0: 10, 1: 10, 2: 10, 3: 10, 4: 10}") == 3
    assert "50 source reads; the boxes are BoundingBoxes" in output


def test_volumes_random_patches(cache_dir: Path) -> None:
    output = run("volumes_random_patches.py", "--samples", "6", "--side", "32")
    assert "epoch 2: 6 patches, 6 volumes read in all" in output
    assert "12.5% of each volume is copied a read; the patches differ: True" in output


def test_hugging_face_datasets(cache_dir: Path) -> None:
    pytest.importorskip("datasets")
    output = run("hugging_face_datasets.py", "--samples", "64")
    assert "epoch 2: 64 rows, 64 read from the source in all" in output
    assert "its columns, through the cache: ['image', 'label']" in output


def test_lightning_module(cache_dir: Path) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    output = run("lightning_module.py", "--samples", "96")
    assert "9 steps; 96 source reads, 192 hits" in output


def test_object_store(tmp_path: Path) -> None:
    output = run("object_store.py", "--samples", "96", "--epochs", "10", "--workers", "4", "--jobs", "2")
    assert output.count("all alike: True") == 2
    assert "samples drawn: 1,920; GETs at the server: 96; samples: 96" in output


def test_staging_then_training(tmp_path: Path) -> None:
    output = run("staging_then_training.py", "--samples", "48")
    assert output.count("48 samples, 48 files decoded so far") == 2
    assert "the same folder: True; files: 48" in output


def test_ddp_two_nodes(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    nodes = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)),
                *("--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port),
                *(str(EXAMPLES / "ddp_two_nodes.py"), "--samples", "256", "--batch-size", "16"),
            ],
            env={**os.environ, "CACHE_DIR": str(tmp_path / f"node{node}"), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]  # with run("ddp_two_nodes.py") there would be one node
    try:
        outputs = [node.communicate(timeout=90) for node in nodes]
    finally:  # a node that waits for one that failed goes with it
        for node in nodes:
            node.kill()
            node.communicate()
    assert [node.returncode for node in nodes] == [0, 0], outputs
    output = outputs[0][0]
    assert "12 steps on each of 4 ranks, losses equal plain DDP's: True" in output
    assert "source reads: 256 for 256 samples and 3 epochs" in output
    assert "samples cached on each node: [128, 128]" in output


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in tested for path in EXAMPLES.glob("*.py"))
