"""The examples, as processes, at a small size; and the claims of their output."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, check=False
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


def test_every_example_is_tested() -> None:
    tested = Path(__file__).read_text()
    assert all(f'run("{path.name}"' in tested for path in EXAMPLES.glob("*.py"))
