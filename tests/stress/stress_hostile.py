"""Ten thousand damaged and hostile stores."""

from __future__ import annotations

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_hostile import originals, read_hostile

STORES, PER_PROGRAM, PROGRAMS = 10_000, 500, 2


@pytest.mark.timeout(3600)
def test_hostile_stores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record: list[str]) -> None:
    arguments = originals(tmp_path, monkeypatch)

    def read(first: int) -> Counter[str]:
        return read_hostile(arguments, first, first + PER_PROGRAM)

    with ThreadPoolExecutor(PROGRAMS) as pool:
        outcomes = sum(pool.map(read, range(1_000_000, 1_000_000 + STORES, PER_PROGRAM)), Counter())
    assert outcomes.total() == STORES
    record.append(f"{STORES:,} damaged and hostile stores: {dict(outcomes)}")
