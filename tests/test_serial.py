"""Copies that PyTorch does not spread over threads: the same as its own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same

from torchcache import serial
from torchcache.serial import GRAIN_ELEMENTS

SHAPES = [(3,), (GRAIN_ELEMENTS - 1,), (GRAIN_ELEMENTS,), (2, GRAIN_ELEMENTS + 5), (300, 400), (3, 200, 201)]
DTYPES = [torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.bool]


@pytest.fixture(autouse=True)
def threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def noise(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, (*shape, dtype.itemsize), dtype=torch.uint8, generator=generator).view(dtype)[..., 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_stack(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    values = [noise(shape, dtype, seed) for seed in range(3)]
    found = serial.stack(values)
    assert found.shape == (3, *shape)
    for part, value in zip(found, values, strict=True):
        assert_same(part.clone(), value)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_contiguous(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = noise((*shape, 2), dtype)
    for x in (whole[..., 0], whole.movedim(0, -1), whole[..., :1].expand(*shape, 3), whole):
        found = serial.contiguous(x)
        assert found.is_contiguous()
        assert_same(found, x.contiguous())
    if dtype.is_complex:
        for x in (whole.conj(), whole.conj().imag, whole.conj().movedim(0, -1)):
            assert_same(serial.contiguous(x), x.resolve_conj().resolve_neg().contiguous())


@pytest.mark.parametrize("elements", [5, 1000, GRAIN_ELEMENTS - 1, GRAIN_ELEMENTS, 2 * GRAIN_ELEMENTS])
@pytest.mark.parametrize("given", [False, True])
def test_select_from_overlapping_rows(elements: int, given: bool) -> None:
    memory = torch.arange(4 * GRAIN_ELEMENTS, dtype=torch.int32)
    window = memory.as_strided((len(memory) - elements + 1, elements), (1, 1))
    rows = torch.tensor([7, 0, len(window) - 1, 7] * 10)
    out = torch.empty(len(rows), elements, dtype=torch.int32) if given else None
    found = serial.select(window, rows, out)
    assert_same(found, torch.stack([window[row] for row in rows.tolist()]))
    assert out is None or found is out or found.data_ptr() == out.data_ptr()
    for wrong in (-1, len(window)):
        with pytest.raises(IndexError):
            serial.select(window, torch.tensor([0, wrong] * 20), out)


def test_take() -> None:
    source = torch.from_numpy(np.arange(100_000).reshape(50_000, 2))
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 50_000, 40_000))
    assert_same(serial.take(source, rows), source[rows])


def test_only_the_cpus_memory() -> None:
    with pytest.raises((TypeError, RuntimeError, NotImplementedError)):
        serial.stack([torch.empty(GRAIN_ELEMENTS, device="meta")] * 2)
