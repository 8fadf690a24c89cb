"""Samples → (spec, leaves), one by one or many at once. ``encode`` has the rules, ``schema`` goes the other way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache.encode import NUMPY_DTYPES, encode, stored_whole
from torchcache.errors import UnsupportedSampleError
from torchcache.leaves import DTYPE_NAMES, MAX_DEPTH, NUMBER_DTYPES, Dims, Leaf, Leaves, Spec
from torchcache.serial import stack

RECORD_BYTES = 16  # about what a value costs beside its own bytes, where shapes differ


def flatten(sample: Any, *, allow_pickle: bool = False) -> tuple[Spec, Leaves]:
    """Takes a sample apart.

    Args:
        sample: any nesting of the supported types (docs/fidelity.md lists them).
        allow_pickle: pickle what cannot be stored otherwise.

    Returns:
        The spec, and the leaves in the order in which the spec names them. The leaves may share memory with the
        sample; ``Flat.detached`` copies them.

    Raises:
        UnsupportedSampleError: naming the type and its place in the sample.
    """
    leaves = Leaves(allow_pickle)
    try:
        return encode(sample, leaves, 0), leaves
    except UnsupportedSampleError as error:
        place, reason = _find_unsupported(sample, "sample", str(error))
        raise UnsupportedSampleError(
            f"{place}: {reason}. Convert it in the dataset to tensors, arrays, numbers, strings or containers of "
            f"these, say how to store the class by torchcache.register, or give allow_pickle=True"
        ) from None


class Uniform(NamedTuple):
    """One leaf of several samples, of the same shape in all of them: the shape, and an array of (samples, bytes)."""

    dims: Dims
    data: Any

    def leaves(self) -> list[Leaf]:
        return [(self.dims, row) for row in self.data]


@dataclass(frozen=True, slots=True)
class Flat:
    """Samples of one structure, taken apart.

    Attributes:
        spec: the structure.
        indices: which samples.
        columns: for each leaf of the structure its values, one a sample.
    """

    spec: Spec
    indices: list[int]
    columns: list[Uniform | list[Leaf]]

    def rows(self, rows: Sequence[int]) -> Flat:
        """Some of the samples."""
        columns = [
            Uniform(column.dims, column.data[list(rows)]) if isinstance(column, Uniform) else [column[r] for r in rows]
            for column in self.columns
        ]
        return Flat(self.spec, [self.indices[r] for r in rows], columns)

    def detached(self) -> Flat:
        """With copies of all memory, so that it does not matter what is done with the samples, or with these."""
        columns = [
            Uniform(column.dims, column.data.copy())
            if isinstance(column, Uniform)
            else [(dims, bytes(data)) for dims, data in column]
            for column in self.columns
        ]
        return Flat(self.spec, list(self.indices), columns)

    def extend(self, other: Flat) -> None:
        """Adds samples of the same structure; neither these nor the others are uniform."""
        self.indices.extend(other.indices)
        for column, more in zip(self.columns, other.columns, strict=True):
            assert not isinstance(column, Uniform) and not isinstance(more, Uniform)
            column.extend(more)

    @property
    def nbytes(self) -> int:
        """About how many bytes all of them add to a block: the sum of ``sizes``."""
        total = 0
        for column in self.columns:
            if isinstance(column, Uniform):
                total += column.data.shape[1] * len(self.indices)
            else:
                total += RECORD_BYTES * len(column) + sum([len(data) for _, data in column])
        return total

    def sizes(self) -> list[int]:
        """About how many bytes each sample adds to a block."""
        size = sum([column.data.shape[1] for column in self.columns if isinstance(column, Uniform)])
        ragged = [column for column in self.columns if not isinstance(column, Uniform)]
        if not ragged:
            return [size] * len(self.indices)
        return [size + sum([len(column[r][1]) + RECORD_BYTES for column in ragged]) for r in range(len(self.indices))]


def flatten_many(indices: Sequence[int], samples: Sequence[Any], *, allow_pickle: bool = False) -> list[Flat]:
    """Takes several samples apart: at once where all have the same structure, dtypes and shapes.

    Args:
        indices: which samples they are.
        samples: the samples.
        allow_pickle: as for ``flatten``.

    Returns:
        One ``Flat`` for each structure among them.
    """
    if len(samples) == 1:
        spec, leaves = flatten(samples[0], allow_pickle=allow_pickle)
        return [Flat(spec, list(indices), [[leaf] for leaf in leaves])]
    columns: list[Uniform | list[Leaf]] = []
    shared = _transpose(samples, columns, 0) if samples else None
    if shared is not None:
        return [Flat(shared, list(indices), columns)]
    groups: dict[Spec, tuple[list[int], list[list[Leaf]]]] = {}
    for index, sample in zip(indices, samples, strict=True):
        spec, leaves = flatten(sample, allow_pickle=allow_pickle)
        members, rows = groups.setdefault(spec, ([], []))
        members.append(index)
        rows.append(leaves)
    return [
        Flat(spec, members, [list(leaves) for leaves in zip(*rows, strict=True)])
        for spec, (members, rows) in groups.items()
    ]


def _transpose(values: Sequence[Any], columns: list[Uniform | list[Leaf]], depth: int) -> Spec | None:
    """Takes several samples apart at once: returns the spec that they share, and appends their columns.

    Returns:
        ``None`` if they differ, or hold what only ``flatten`` can store.
    """
    first, cls = values[0], type(values[0])
    if depth > MAX_DEPTH or len(set(map(type, values))) > 1:
        return None
    if cls is torch.Tensor:
        return _stack_tensors(values, columns)
    if cls is int or cls is float or cls is bool:
        try:
            array = np.array(values, NUMBER_DTYPES[cls.__name__])
        except OverflowError:
            return None
        columns.append(Uniform((), array.view(np.uint8).reshape(len(values), -1)))
        return (cls.__name__,)
    if cls is tuple or cls is list:
        if len(set(map(len, values))) > 1 or stored_whole(first):
            return None
        parts = zip(*values, strict=True)
    elif cls is dict:
        keys = list(first)
        if any(list(value) != keys for value in values) or any(type(key) is not str for key in keys):
            return None
        parts = zip(*[value.values() for value in values], strict=True)
    else:
        return None
    children = [_transpose(part, columns, depth + 1) for part in parts]
    if None in children:
        return None
    return (cls.__name__, tuple(keys), tuple(children)) if cls is dict else (cls.__name__, tuple(children))


def _stack_tensors(values: Sequence[Any], columns: list[Uniform | list[Leaf]]) -> Spec | None:
    first = values[0]
    dtype, shape = first.dtype, first.shape
    if dtype not in NUMPY_DTYPES or not shape or not first.numel():
        return None
    if len({(x.dtype, x.shape, x.requires_grad) for x in values}) > 1 or first.requires_grad:
        return None
    # The layout first: others have no strides to ask for.
    if first.layout is not torch.strided or False in {x.is_contiguous() for x in values}:
        return None
    try:
        stacked = stack(values)
    except (RuntimeError, TypeError):  # sparse, nested or on different devices
        return None
    if stacked.layout is not torch.strided or stacked.device.type != "cpu" or stacked.is_nested:
        return None
    columns.append(Uniform(tuple(shape), stacked.view(len(values), -1).numpy().view(np.uint8)))
    return ("tensor", DTYPE_NAMES[dtype], len(shape), (), 0)


def _find_unsupported(value: Any, place: str, reason: str) -> tuple[str, str]:
    """Descends to the innermost part of a sample that cannot be stored."""
    if isinstance(value, dict):
        parts: Iterator[tuple[str, Any]] = ((f"{place}[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, (tuple, list)):
        parts = ((f"{place}[{i}]", item) for i, item in enumerate(value))
    else:
        return place, reason
    for where, item in parts:
        try:
            encode(item, Leaves(), 0)
        except UnsupportedSampleError as error:
            if "levels deep" in str(error):
                return where, str(error)
            return _find_unsupported(item, where, str(error))
    return place, reason
