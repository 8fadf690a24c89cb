"""Sample → (spec, leaves): which types a sample may hold, and exactly what is stored of each.

A *spec* is the structure of a sample without its values: nested tuples of strings and integers, hashable and
JSON-like. A *leaf* is ``(dims, data)``: the shape of one value and its bytes. ``schema`` goes the other way.
"""

from __future__ import annotations

import json
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache.errors import UnsupportedSampleError

Spec = tuple[Any, ...]
Dims = tuple[int, ...]
Leaf = tuple[Dims, Any]  # (shape, bytes-like of one dimension)

# at::internal::GRAIN_SIZE: below it PyTorch uses one thread. Above, it waits for the slowest of several at the end of
# each call, and where a core has other work to do, that is a scheduler's time slice: too long for copying a batch.
GRAIN_ELEMENTS = 32_768
MAX_DEPTH = 100  # levels of nesting; deeper is a sample that contains itself, or a hostile file

MAX_CHILDREN = 1024  # items of one container: each becomes a column of its own

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
DTYPE_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
# Quantized tensors carry scales beside their bytes, and the bits types cannot be looked into; neither is storable.
_OPAQUE_DTYPES = frozenset(d for d, name in DTYPE_NAMES.items() if name.startswith(("q", "bits")))
_FIXED_DTYPES = {"int": "<i8", "float": "<f8", "bool": "<u1"}
# Tensors of these dtypes become arrays without a detour through a uint8 view.
_NUMPY_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
)


# ---------------------------------------------------------------------------------------------------- flatten


def flatten(sample: Any) -> tuple[Spec, list[Leaf]]:
    """Takes a sample apart.

    Args:
        sample: any nesting of the supported types (docs/format.md lists them).

    Returns:
        The spec, and the leaves in the order in which the spec names them. The leaves may share memory with the
        sample; ``Flat.detach`` copies them.

    Raises:
        UnsupportedSampleError: naming the type and its place in the sample.
    """
    leaves: list[Leaf] = []
    try:
        return _flatten(sample, leaves, 0), leaves
    except UnsupportedSampleError as error:
        place, reason = _find_unsupported(sample, "sample", str(error))
        raise UnsupportedSampleError(
            f"{place}: {reason}. Convert it in the dataset to tensors, arrays, numbers, strings or containers of these."
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

    def detach(self) -> None:
        """Copies what may share memory with the samples, so that what the caller does with these no longer matters."""
        for c, column in enumerate(self.columns):
            if not isinstance(column, Uniform):  # those are copies already
                self.columns[c] = [(dims, bytes(data)) for dims, data in column]

    @property
    def nbytes(self) -> int:
        """About how many bytes all of them add to a block."""
        return sum(self.sizes())

    def sizes(self) -> list[int]:
        """About how many bytes each sample adds to a block."""
        size = sum([column.data.shape[1] for column in self.columns if isinstance(column, Uniform)])
        ragged = [column for column in self.columns if not isinstance(column, Uniform)]
        if not ragged:
            return [size] * len(self.indices)
        return [size + sum([len(column[r][1]) + 16 for column in ragged]) for r in range(len(self.indices))]


def flatten_many(indices: Sequence[int], samples: Sequence[Any]) -> list[Flat]:
    """Takes several samples apart: at once where all have the same structure, dtypes and shapes.

    Args:
        indices: which samples they are.
        samples: the samples.

    Returns:
        One ``Flat`` for each structure among them.
    """
    columns: list[Uniform | list[Leaf]] = []
    spec = _transpose(samples, columns, 0) if len(samples) > 1 else None
    if spec is not None:
        return [Flat(spec, list(indices), columns)]
    groups: dict[Spec, tuple[list[int], list[list[Leaf]]]] = {}
    for index, sample in zip(indices, samples, strict=True):
        spec, leaves = flatten(sample)
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
            array = np.array(values, _FIXED_DTYPES[cls.__name__])
        except OverflowError:
            return None
        columns.append(Uniform((), array.view(np.uint8).reshape(len(values), -1)))
        return (cls.__name__,)
    if cls is tuple or cls is list:
        if len(set(map(len, values))) > 1:
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
    if dtype not in _NUMPY_DTYPES or not shape or not first.numel():
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


def stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack`` of equal shapes in calls that PyTorch does not spread over threads (see ``GRAIN_ELEMENTS``)."""
    elements = values[0].numel()
    if len(values) * elements < GRAIN_ELEMENTS or elements >= GRAIN_ELEMENTS:
        return torch.stack(values)  # type: ignore[arg-type]
    out = torch.empty((len(values), *values[0].shape), dtype=values[0].dtype, device=values[0].device)
    step = (GRAIN_ELEMENTS - 1) // elements
    for first in range(0, len(values), step):
        torch.stack(values[first : first + step], out=out[first : first + step])  # type: ignore[arg-type]
    return out


def _flatten(value: Any, leaves: list[Leaf], depth: int) -> Spec:
    flattener = _FLATTENERS.get(type(value))
    if flattener is None:
        flattener = _resolve(type(value))
    return flattener(value, leaves, depth)


def _resolve(cls: type) -> Callable[[Any, list[Leaf], int], Spec]:
    """Finds the rule for a type that is met for the first time, and remembers it."""
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        rule: Callable[[Any, list[Leaf], int], Spec] = _flatten_namedtuple
    elif issubclass(cls, np.generic):
        rule = _flatten_numpy_scalar
    elif cls is np.memmap:
        rule = _flatten_array
    elif "PIL.Image" in sys.modules and issubclass(cls, sys.modules["PIL.Image"].Image):
        rule = _flatten_pil
    else:
        raise UnsupportedSampleError(f"{_type_name(cls)} cannot be stored")
    _FLATTENERS[cls] = rule
    return rule


def _flatten_tensor(x: torch.Tensor, leaves: list[Leaf], depth: int) -> Spec:
    dtype = x.dtype
    if x.layout is not torch.strided or x.device.type != "cpu" or dtype in _OPAQUE_DTYPES or x.is_nested:
        raise UnsupportedSampleError(f"a {x.layout} tensor of {dtype} on {x.device} cannot be stored")
    requires_grad = x.requires_grad
    if requires_grad:
        if not x.is_leaf:
            raise UnsupportedSampleError(
                "a tensor that is part of a graph (requires_grad, not a leaf) must be detached"
            )
        x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    dims = tuple(x.shape)
    order = _dense_order(x)
    if order:
        x = x.permute(order)
    if x.numel() == 0:
        leaves.append((dims, b""))
    else:
        x = x.contiguous().view(-1)
        data = x.numpy() if dtype in _NUMPY_DTYPES else x.view(torch.uint8).numpy()
        leaves.append((dims, data.view(np.uint8)))
    return ("tensor", DTYPE_NAMES[dtype], len(dims), order, int(requires_grad))


def _dense_order(x: torch.Tensor) -> Dims:
    """The order of dimensions in memory if that is not the usual one, as for channels_last; else ``()``."""
    if x.is_contiguous() or x.numel() == 0:
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.ndim), key=lambda d: (-strides[d], d)))
    return order if order != tuple(range(x.ndim)) and x.permute(order).is_contiguous() else ()


def _flatten_array(x: np.ndarray[Any, Any], leaves: list[Leaf], depth: int) -> Spec:
    if x.dtype.hasobject:
        raise UnsupportedSampleError(f"a NumPy array of dtype {x.dtype} (Python objects) cannot be stored")
    fortran = x.flags.f_contiguous and not x.flags.c_contiguous
    leaves.append((x.shape, _array_bytes(x.T if fortran else x)))
    return ("ndarray", _descr(x.dtype), x.ndim, int(fortran))


def _array_bytes(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    flat = np.asarray(x).reshape(-1)  # copies where the elements do not lie one after another
    if not flat.flags.c_contiguous:
        flat = flat.copy()
    return flat.view(np.uint8) if flat.dtype.itemsize else np.empty(0, np.uint8)


def _flatten_numpy_scalar(x: np.generic, leaves: list[Leaf], depth: int) -> Spec:
    if x.dtype.hasobject:
        raise UnsupportedSampleError(f"a NumPy scalar of dtype {x.dtype} (a Python object) cannot be stored")
    leaves.append(((), x.tobytes()[: x.dtype.itemsize]))  # an empty string has no bytes, and gives some
    return ("npscalar", _descr(x.dtype))


@lru_cache(maxsize=4096)
def _descr(dtype: np.dtype[Any]) -> str:
    """A dtype as text, by NumPy's own file format: byte order, units, fields and padding included."""
    descr = np.lib.format.dtype_to_descr(dtype)
    if np.lib.format.descr_to_dtype(descr) != dtype:
        raise UnsupportedSampleError(f"the NumPy dtype {dtype} cannot be written down exactly")
    return json.dumps(descr, separators=(",", ":"))


def _flatten_int(x: int, leaves: list[Leaf], depth: int) -> Spec:
    if _INT64_MIN <= x <= _INT64_MAX:
        leaves.append(((), x.to_bytes(8, "little", signed=True)))
        return ("int",)
    data = x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
    leaves.append(((len(data),), data))
    return ("bigint",)


def _flatten_fixed(kind: str, dtype: str) -> Callable[[Any, list[Leaf], int], Spec]:
    make, spec = np.dtype(dtype).type, (kind,)

    def flatten_fixed(x: Any, leaves: list[Leaf], depth: int) -> Spec:
        leaves.append(((), make(x).tobytes()))
        return spec

    return flatten_fixed


def _flatten_raw(kind: str, encode: Callable[[Any], bytes]) -> Callable[[Any, list[Leaf], int], Spec]:
    spec = (kind,)

    def flatten_raw(x: Any, leaves: list[Leaf], depth: int) -> Spec:
        data = encode(x)
        leaves.append(((len(data),), data))
        return spec

    return flatten_raw


def _flatten_constant(kind: str) -> Callable[[Any, list[Leaf], int], Spec]:
    spec = (kind,)
    return lambda x, leaves, depth: spec


def _flatten_children(values: Any, leaves: list[Leaf], depth: int) -> Spec:
    if depth >= MAX_DEPTH:
        raise UnsupportedSampleError(f"nested more than {MAX_DEPTH} levels deep, or contains itself")
    if len(values) > MAX_CHILDREN:
        raise UnsupportedSampleError(f"a container of {len(values)} items is too long; make it a tensor or an array")
    return tuple([_flatten(value, leaves, depth + 1) for value in values])


def _flatten_sequence(kind: str) -> Callable[[Any, list[Leaf], int], Spec]:
    return lambda x, leaves, depth: (kind, _flatten_children(x, leaves, depth))


def _flatten_mapping(kind: str) -> Callable[[Any, list[Leaf], int], Spec]:
    def flatten_mapping(x: Any, leaves: list[Leaf], depth: int) -> Spec:
        return (kind, tuple([_encode_key(key) for key in x]), _flatten_children(x.values(), leaves, depth))

    return flatten_mapping


def _flatten_namedtuple(x: Any, leaves: list[Leaf], depth: int) -> Spec:
    cls = type(x)
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise UnsupportedSampleError(f"the namedtuple {_type_name(cls)} cannot be found by that name")
    return ("namedtuple", cls.__module__, cls.__qualname__, tuple(cls._fields), _flatten_children(x, leaves, depth))


def _flatten_pil(x: Any, leaves: list[Leaf], depth: int) -> Spec:
    x.load()  # a lazily opened file keeps its descriptor, and its pixels may be gone by the time they are read
    palette = (x.palette.mode, x.getpalette(x.palette.mode)) if x.palette is not None else None
    info = {key: value for key, value in x.info.items() if _is_supported(value) and type(key) is str}
    state = (*x.size, x.tobytes(), None if palette is None else (palette[0], bytes(palette[1])), info, x.format)
    return ("pil", x.mode, _flatten_children(state, leaves, depth))


def _is_supported(value: Any) -> bool:
    try:
        _flatten(value, [], 0)
    except UnsupportedSampleError:
        return False
    return True


_FLATTENERS: dict[type, Callable[[Any, list[Leaf], int], Spec]] = {
    torch.Tensor: _flatten_tensor,
    np.ndarray: _flatten_array,
    bool: _flatten_fixed("bool", _FIXED_DTYPES["bool"]),
    int: _flatten_int,
    float: _flatten_fixed("float", _FIXED_DTYPES["float"]),
    complex: _flatten_fixed("complex", "<c16"),
    str: _flatten_raw("str", lambda x: x.encode("utf-8", "surrogatepass")),
    bytes: _flatten_raw("bytes", lambda x: x),
    bytearray: _flatten_raw("bytearray", bytes),
    type(None): _flatten_constant("none"),
    type(...): _flatten_constant("ellipsis"),
    tuple: _flatten_sequence("tuple"),
    list: _flatten_sequence("list"),
    torch.Size: _flatten_sequence("size"),
    dict: _flatten_mapping("dict"),
    OrderedDict: _flatten_mapping("odict"),
}


def _encode_key(key: Any) -> Any:
    """A dict key as part of a spec. Tagged, because ``1 == True == 1.0`` and a spec is compared as a whole."""
    cls = type(key)
    if cls is str:
        return key
    if cls is int or cls is bool:
        return (cls.__name__, str(int(key)))
    if cls is float:
        return ("float", key.hex())
    if key is None:
        return ("none", "")
    if cls is bytes:
        return ("bytes", key.hex())
    if cls is tuple:
        return ("tuple", tuple([_encode_key(item) for item in key]))
    raise UnsupportedSampleError(f"a dict key of {_type_name(cls)} cannot be stored")


def find_class(module: str, qualname: str) -> Any:
    """The class of that name, if its module has already been imported."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        found = getattr(found, part, None)
    return found


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
            _flatten(item, [], 0)
        except UnsupportedSampleError as error:
            if "levels deep" in str(error):
                return where, str(error)
            return _find_unsupported(item, where, str(error))
    return place, reason


def _type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
