"""Copies of tensors that PyTorch does not spread over threads.

From ``GRAIN_ELEMENTS`` on PyTorch gives a part of each call to each of its threads, and waits for the slowest: where a
core has other work to do, that is a scheduler's time slice, too long for copying a batch. And in a forked process
whose parent has used them, the threads are gone, and the call waits for ever.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from torchcache import memory

GRAIN_ELEMENTS = 32_768  # at::internal::GRAIN_SIZE: below it one thread does it all
_CPU = torch.device("cpu")  # said each time: the user may have set another default


def take(source: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """``source.index_select(0, rows)``, for rows that are there and not counted from the end."""
    return torch.from_numpy(source.numpy().take(rows.numpy(), axis=0))


def select(window: torch.Tensor, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.index_select(window, 0, rows, out=out)``, where the rows of ``window`` may overlap.

    Raises:
        IndexError: if there is no such row.
    """
    count = rows.numel()
    elements = math.prod(window.shape[1:])
    if out is None and count * elements * window.dtype.itemsize >= memory.LARGE_BYTES:
        out = memory.empty((count, *window.shape[1:]), window.dtype)
    if count * elements < GRAIN_ELEMENTS or torch.get_num_threads() == 1:
        return torch.index_select(window, 0, rows, out=out)
    if out is None:
        out = torch.empty((count, *window.shape[1:]), dtype=window.dtype, device=_CPU)
    if elements >= GRAIN_ELEMENTS:
        return _select_large(window, rows, out)
    step = (GRAIN_ELEMENTS - 1) // elements
    parts = zip(out.split(step), rows.split(step), strict=True)  # type: ignore[no-untyped-call]
    for part, where in parts:
        torch.index_select(window, 0, where, out=part)
    return out


def _select_large(window: torch.Tensor, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    scatter(window, rows, out, range(len(rows)))
    return out


def scatter(window: torch.Tensor, rows: torch.Tensor, out: torch.Tensor, numbers: Sequence[int]) -> None:
    """``out[numbers] = window[rows]``, a row at a time: for large ones.

    Raises:
        IndexError: if there is no such row in ``window``.
    """
    # As unsigned numbers the negative ones, which NumPy counts from the end, are large.
    if int(rows.numpy().view(np.uint64).max()) >= len(window):
        raise IndexError("a row is not one of the window's")
    source, target = window.numpy(), out.numpy()
    for number, row in zip(numbers, rows.tolist(), strict=True):
        np.copyto(target[number], source[row])


def stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack`` of strided tensors of one dtype and one shape, in the CPU's memory, that need no gradient.

    Raises:
        RuntimeError, TypeError: if they are no such tensors, as far as ``torch.stack`` raises, too.
    """
    elements = values[0].numel()
    if len(values) * elements < GRAIN_ELEMENTS:
        return torch.stack(values)  # type: ignore[arg-type]
    out = memory.empty((len(values), *values[0].shape), values[0].dtype)
    if elements >= GRAIN_ELEMENTS:
        if any(value.device.type != "cpu" for value in values):  # which would be copied from there
            raise TypeError("only tensors in the CPU's memory are stacked")
        for part, value in zip(out, values, strict=True):
            _copy(value, part)
        return out
    step = (GRAIN_ELEMENTS - 1) // elements
    for first in range(0, len(values), step):
        torch.stack(values[first : first + step], out=out[first : first + step])  # type: ignore[arg-type]
    return out


def contiguous(x: torch.Tensor) -> torch.Tensor:
    """``x.resolve_conj().resolve_neg().contiguous()`` of a strided tensor in the CPU's memory."""
    if x.is_contiguous() and not (x.is_conj() or x.is_neg()):
        return x
    out = torch.empty(x.shape, dtype=x.dtype, device=_CPU)
    _copy(x, out)
    return out


def _copy(x: torch.Tensor, out: torch.Tensor) -> None:
    if x.numel() < GRAIN_ELEMENTS:
        out.copy_(x)
        return
    step = max(1, (GRAIN_ELEMENTS - 1) * len(x) // x.numel())
    if step == 1 and x.ndim > 1:
        for part, target in zip(x, out, strict=True):
            _copy(part, target)
        return
    for first in range(0, len(x), step):
        out[first : first + step].copy_(x[first : first + step])
