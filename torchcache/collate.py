"""Cached batches through a stock ``DataLoader``: one gather a column instead of one object a sample.

``DataLoader`` asks the dataset for a batch by ``__getitems__`` and hands the answer to its ``collate_fn``. Where that
is ``default_collate``, the answer is a list of one sample whose leaves are gathered columns; ``default_collate`` takes
the sample apart as it would any other, and finds for each column the function registered here (PyTorch's documented
extension point), which gives it. So containers are handled by PyTorch itself, whatever they are. For the most common
ones it is asked only once what it makes of them.

The gather is done before, not in that function: where it fails, the batch can still come from the source.

Everybody else, a ``collate_fn`` of the user's in particular, gets a list of ordinary samples. Who asks is told by the
calling frame: should PyTorch rename what is looked for here, batches become slower and stay right.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import lru_cache
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate, default_collate_fn_map
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from torchcache.column import Column
from torchcache.flatten import Flat, Uniform
from torchcache.leaves import Dims, Spec
from torchcache.places import Rows
from torchcache.reader import Reader
from torchcache.schema import Part, Schema, outline

# What gathered leaves stand for, and the containers around them. Objects of other classes are collated by PyTorch.
_BASIC = (
    torch.Tensor,
    np.ndarray,
    np.generic,
    int,
    float,
    complex,
    str,
    bytes,
    bytearray,
    tuple,
    list,
    dict,
    type(None),
)
_FETCH_CODE = _MapDatasetFetcher.fetch.__code__
_SUBSET_CODE = Subset.__getitems__.__code__


class Gathered:
    """What ``default_collate`` makes of a leaf, an object or a whole sample of a batch, in the place of the first."""

    __slots__ = ("result",)

    def __init__(self, result: Any) -> None:
        self.result = result


class Uncollated:
    """The leaves of a batch that ``default_collate`` has to collate itself, in the place of the first."""

    __slots__ = ("values",)

    def __init__(self, values: list[Any]) -> None:
        self.values = values


def _result(batch: Any, *, collate_fn_map: Any = None) -> Any:
    return batch[0].result


def _collate_values(batch: Any, *, collate_fn_map: Any = None) -> Any:
    """As ``default_collate`` would a list (or tuple) of the values."""
    return collate(type(batch)(batch[0].values), collate_fn_map=collate_fn_map)


default_collate_fn_map[Gathered] = _result
default_collate_fn_map[Uncollated] = _collate_values
# PyTorch's own functions and ours: what the user registered, before or after, must see the user's samples.
_known_map = {
    key: function
    for key, function in default_collate_fn_map.items()
    if function.__module__ in (collate.__module__, __name__)
}


def fetcher_of(caller: FrameType) -> FrameType | None:
    """The ``DataLoader``'s fetcher that hands what ``__getitems__`` returns to ``default_collate``, as it is.

    Args:
        caller: the frame that called ``__getitems__``: the fetcher's, perhaps with ``Subset``s between.

    Returns:
        The fetcher's frame; ``None`` if it goes elsewhere.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is _SUBSET_CODE:
        frame = frame.f_back
    if frame is None or frame.f_code is not _FETCH_CODE or frame.f_locals["self"].collate_fn is not default_collate:
        return None
    return frame


def collated(batch: Any) -> list[Any]:
    """A list of one object that ``default_collate`` turns into this batch, which is one already."""
    return [Gathered(batch)]


def is_default() -> bool:
    """Whether ``default_collate`` does what it does by default with what samples are made of.

    Nobody has replaced its functions, or added some but for classes of their own (tensordict does so on import).
    """
    functions = default_collate_fn_map
    # Numbers become tensors on the default device. (Asking for that itself takes five times as long.)
    return (functions == _known_map or _concern_others(tuple(functions.items()))) and torch.empty(0).is_cpu


@lru_cache(maxsize=16)
def _concern_others(functions: tuple[tuple[Any, Any], ...]) -> bool:
    added = dict(functions)
    if any(added.pop(key, None) is not function for key, function in _known_map.items()):
        return False
    classes = [cls for key in added for cls in (key if isinstance(key, tuple) else (key,))]
    return not any(issubclass(cls, _BASIC) or any(issubclass(basic, cls) for basic in _BASIC) for cls in classes)


def batch_of(reader: Reader, rows: Rows) -> list[Any]:
    """A list of one object that ``default_collate`` turns into the batch of all the rows.

    Raises:
        StoreError: if they cannot be read.
    """
    schema = rows.table.schema
    shared = get_worker_info() is not None
    make = shortcut(schema)
    if make is not None:
        return [Gathered(make([reader.gather(rows, c, shared=shared) for c in range(len(schema.columns))]))]
    reader.announce_rows(rows)
    fill, parts = _outline(schema)
    return [fill([_part(reader, rows, part, shared) for part in parts])]


def _part(reader: Reader, rows: Rows, part: Part, shared: bool) -> Gathered | Uncollated:
    first, last, schema = part
    if schema is None and _gathers(rows.table.schema.columns[first]):
        return Gathered(reader.gather(rows, first, shared=shared))
    if schema is None and _is_turned(rows.table.schema.columns[first]):
        return Uncollated(_turned(reader.gather(rows, first), rows.table.schema.columns[first]))
    found = []
    for row in rows.rows.tolist():
        values = [reader.value(rows.table, c, row, True) for c in range(first, last)]
        found.append(values[0] if schema is None else schema.rebuild(values))
    return Uncollated(found)


def _is_turned(column: Column) -> bool:
    """Whether its values are tensors whose dimensions lie in another order in memory, as ``PILToTensor`` makes them."""
    return bool(
        column.kind == "tensor" and column.shape and column.order and not column.requires_grad and column.stride
    )


def _turned(gathered: torch.Tensor, column: Column) -> list[Any]:
    """The values of a gathered column, as views with the strides of the source's: PyTorch stacks them as it does those.

    Args:
        gathered: their bytes as they are stored, in a tensor of the shape that the values have.
        column: the column.
    """
    assert column.shape is not None
    stored = gathered.view(-1, *column.stored_shape(column.shape))
    return list(stored.permute(0, *[1 + axis for axis in column.axes]).unbind(0))


def stacked_batch(samples: Flat) -> list[Any] | None:
    """The same for samples that are in memory, already stacked; ``None`` if they are not, or need PyTorch's care."""
    columns = [column for column in samples.columns if isinstance(column, Uniform)]
    if len(columns) < len(samples.columns):
        return None
    found = _shortcut_of(samples.spec, tuple([column.dims for column in columns]))
    if found is None:
        return None
    schema, make = found
    tensors = []
    for column, kind in zip(columns, schema.columns, strict=True):
        assert kind.torch_dtype is not None  # the shortcut is for such columns alone
        tensors.append(torch.from_numpy(column.data).view(kind.torch_dtype).view(-1, *column.dims))
    return [Gathered(make(tensors))]


@lru_cache(maxsize=256)
def _shortcut_of(spec: Spec, shapes: tuple[Dims, ...]) -> tuple[Schema, Callable[[list[Any]], Any]] | None:
    schema = Schema(spec, shapes)
    make = shortcut(schema)
    return None if make is None else (schema, make)


_outline = lru_cache(maxsize=256)(outline)


@lru_cache(maxsize=256)
def shortcut(schema: Schema) -> Callable[[list[Any]], Any] | None:
    """How to make the batch from its gathered columns, if that is as simple as it is for most samples.

    ``default_collate`` itself shows what becomes of the sample's container. It is asked once instead of for every
    batch, which it would take a third of the time to read.
    """
    if not schema.columns or not all(_gathers(column) for column in schema.columns):
        return None
    if any(part.schema is not None for part in _outline(schema)[1]):
        return None
    leaves = [Gathered(None) for _ in schema.columns]
    try:
        batch = collate([schema.rebuild(leaves)], collate_fn_map={Gathered: lambda batch, **_: batch[0]})
    except TypeError:
        return None  # what cannot be collated is left to fail as it does without the cache
    if batch is leaves[0]:
        return lambda columns: columns[0]
    if type(batch) is list and all(map(operator.is_, batch, leaves)) and len(batch) == len(leaves):
        return list
    if type(batch) is dict and all(map(operator.is_, batch.values(), leaves)) and len(batch) == len(leaves):
        keys = tuple(batch)
        return lambda columns: dict(zip(keys, columns, strict=True))
    return None


@lru_cache(maxsize=4096)
def _gathers(column: Column) -> bool:
    """Whether gathering this column gives exactly what ``default_collate`` would make of its values."""
    if column.shape is None or column.torch_dtype is None or column.order or column.requires_grad:
        return False
    if column.kind == "npscalar":
        scalar: Any = np.zeros((), column.numpy_dtype)[()]
        return (
            isinstance(scalar, (np.bool_, np.number))
            and torch.as_tensor([scalar], device="cpu").dtype == column.torch_dtype
        )
    return column.kind in ("tensor", "ndarray", "int", "float", "bool") and _stacks(column.torch_dtype)


@lru_cache(maxsize=256)
def _stacks(dtype: torch.dtype) -> bool:
    """Whether ``default_collate`` can stack tensors of this dtype; some of the small floats PyTorch only stores."""
    try:
        torch.stack([torch.zeros(dtype.itemsize, dtype=torch.uint8, device="cpu").view(dtype)] * 2)
    except (RuntimeError, NotImplementedError):
        return False
    return True
