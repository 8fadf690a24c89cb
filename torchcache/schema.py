"""(spec, leaves) → sample: the schema of a block, its columns, and how a sample is put together again.

A *schema* is a spec (see ``flatten``) together with the shapes that are the same for every sample of a block; a
leaf whose shape it does not fix is *ragged*. One *column* of a block holds one leaf of every sample.

Nothing here executes what a file says: a class is found by name among the modules that the process has already
imported, never imported for the purpose, and only ever called if it is a namedtuple.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from torchcache.errors import CorruptStoreError, UnsupportedSampleError
from torchcache.flatten import DTYPE_NAMES, MAX_DEPTH, Dims, Spec, find_class

MAX_NDIM = 64  # dimensions of a tensor or array (NumPy's own limit)
MAX_COLUMNS = 65_536  # leaves of one sample; more is a hostile file
RAGGED_ALIGN = 16  # bytes; the largest item size there is (complex128), so that every view is aligned

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SCALARS = {"int": "<i8", "float": "<f8", "complex": "<c16", "bool": "|b1"}
_RAW = frozenset({"str", "bytes", "bytearray", "bigint"})
_EMPTY: dict[str, Any] = {"none": None, "ellipsis": ...}
_CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {"tuple": tuple, "list": list, "size": torch.Size}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "odict": OrderedDict}
_CONTAINER_KINDS = frozenset({*_CONTAINERS, *_MAPPINGS, "namedtuple", "pil"})

# The dtypes whose bytes torch and NumPy share, in this machine's byte order: arrays of these become tensors.
_SHARED_DTYPES = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 float32 float64 complex64 complex128"
_TORCH_BY_NUMPY: dict[np.dtype[Any], torch.dtype] = {
    np.dtype(name): getattr(torch, name) for name in _SHARED_DTYPES.split()
}
_NUMPY_BY_TORCH = {dtype: array for array, dtype in _TORCH_BY_NUMPY.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One leaf of every sample of a schema.

    Attributes:
        kind: what the leaf is: ``tensor``, ``ndarray``, ``npscalar``, ``int``, ``str``, …
        numpy_dtype: the dtype of its elements where NumPy has one, else ``None``.
        torch_dtype: the dtype of its elements where torch has one, else ``None``.
        ndim: number of dimensions; 1 for text and bytes.
        shape: the shape of every sample, or ``None`` for a ragged column.
        itemsize: bytes per element.
        order: order of the dimensions in memory, ``()`` for row-major.
        requires_grad: of a tensor.
    """

    kind: str
    numpy_dtype: np.dtype[Any] | None
    torch_dtype: torch.dtype | None
    ndim: int
    shape: Dims | None
    itemsize: int
    order: Dims = ()
    requires_grad: bool = False

    @property
    def stride(self) -> int:
        """Bytes per sample in the fixed part of a block: the value itself, or a ragged column's record.

        A record is ``1 + ndim`` little-endian 64-bit integers: where the value's bytes lie, counted from the record,
        and its shape.
        """
        return 8 * (1 + self.ndim) if self.shape is None else self.nbytes(self.shape)

    @property
    def unit(self) -> int:
        """Unit of the file offsets of this column, in bytes; every value of the column lies at a multiple of it.

        The widest element of up to 16 bytes that divides the last dimension of a fixed column whose dtype torch has:
        a gather copies whole elements, and few wide ones are faster than many narrow ones.
        """
        if self.shape is None or self.torch_dtype is None:
            return 1
        return math.gcd(16, self.shape[-1] * self.itemsize if self.shape else self.itemsize)

    @property
    def align(self) -> int:
        """Alignment in bytes of each value in a ragged column."""
        return 1 if self.is_raw else RAGGED_ALIGN

    @property
    def is_raw(self) -> bool:
        """Whether the leaf is text or bytes, whose length differs as a rule."""
        return self.kind in _RAW

    def nbytes(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.itemsize

    def decode(self, buffer: Any, offset: int, shape: Dims, copy: bool) -> Any:
        """Makes the value whose bytes start at ``offset`` of ``buffer``; a view of them if not ``copy``."""
        if self.kind == "tensor":
            return self._decode_tensor(buffer, offset, shape, copy)
        if self.kind in _RAW:
            return _decode_raw(self.kind, bytes(memoryview(buffer)[offset : offset + shape[0]]))
        array = self._array(buffer, offset, shape, copy)
        if self.kind == "ndarray":
            array.flags.writeable = copy
            return array
        value = array[()]
        return value if self.kind == "npscalar" else value.item()

    def _array(self, buffer: Any, offset: int, shape: Dims, copy: bool) -> np.ndarray[Any, Any]:
        memory_shape = tuple([shape[d] for d in self.order]) if self.order else shape
        array: np.ndarray[Any, Any] = np.ndarray(memory_shape, self.numpy_dtype or np.uint8, buffer, offset)
        if copy:
            array = array.copy()
        return array.transpose(np.argsort(self.order)) if self.order else array

    def _decode_tensor(self, buffer: Any, offset: int, shape: Dims, copy: bool) -> torch.Tensor:
        if self.numpy_dtype is not None:
            tensor = torch.from_numpy(self._array(buffer, offset, shape, copy))
        else:
            nbytes = self.nbytes(shape)
            if nbytes == 0:  # NumPy's empty arrays have strides that torch does not reinterpret
                return torch.empty(shape, dtype=self.torch_dtype, device="cpu", requires_grad=self.requires_grad)
            array: np.ndarray[Any, Any] = np.ndarray((nbytes,), np.uint8, buffer, offset)
            assert self.torch_dtype is not None
            flat = torch.from_numpy(array.copy() if copy else array).view(self.torch_dtype)
            if self.order:
                tensor = flat.view([shape[d] for d in self.order]).permute(tuple(np.argsort(self.order)))
            else:
                tensor = flat.view(shape)
        return tensor.requires_grad_() if self.requires_grad else tensor


def _decode_raw(kind: str, data: bytes) -> Any:
    if kind == "str":
        return data.decode("utf-8", "surrogatepass")
    if kind == "bigint":
        return int.from_bytes(data, "little", signed=True)
    return bytearray(data) if kind == "bytearray" else data


@dataclass(frozen=True)
class Schema:
    """The structure that all samples of a block share.

    Attributes:
        spec: the structure, from ``flatten``.
        shapes: for each leaf its shape, or ``None`` where it differs from sample to sample.
        columns: what the leaves are, in the same order.
    """

    spec: Spec
    shapes: tuple[Dims | None, ...]
    columns: tuple[Column, ...] = field(init=False, repr=False, compare=False)
    rebuild: Callable[[Sequence[Any]], Any] = field(init=False, repr=False, compare=False)
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        found: list[Column] = []
        build = _builder(self.spec, iter(self.shapes), found, 0)
        if len(found) != len(self.shapes):
            raise CorruptStoreError(f"a schema names {len(found)} leaves and {len(self.shapes)} shapes")
        object.__setattr__(self, "_hash", hash((self.spec, self.shapes)))
        object.__setattr__(self, "columns", tuple(found))
        object.__setattr__(self, "rebuild", build)

    def __hash__(self) -> int:
        return self._hash  # computed once: a deep spec is slow to hash, and batches look things up by schema

    def fits(self, dims: Sequence[Dims]) -> bool:
        """Whether a sample of this spec whose leaves have these shapes can be stored under this schema."""
        return all(shape is None or shape == d for shape, d in zip(self.shapes, dims, strict=True))

    def to_json(self) -> bytes:
        """Canonical JSON: equal schemas give equal bytes."""
        return json.dumps({"shapes": self.shapes, "spec": self.spec}, separators=(",", ":")).encode("ascii")

    @classmethod
    def from_json(cls, text: bytes) -> Schema:
        """Reads what ``to_json`` wrote.

        Raises:
            CorruptStoreError: for anything else, whatever it is.
        """
        try:
            parsed = json.loads(text)
            shapes = tuple([None if s is None else _checked_shape(s) for s in parsed["shapes"]])
            return cls(_as_tuples(parsed["spec"], 0), shapes)
        except (CorruptStoreError, UnsupportedSampleError):
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptStoreError(f"a schema cannot be read ({type(error).__name__}: {error})") from error


def _as_tuples(value: Any, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:
        raise CorruptStoreError("a schema is nested too deeply")
    return tuple([_as_tuples(item, depth + 1) for item in value]) if isinstance(value, list) else value


def _checked_shape(shape: Any) -> Dims:
    if len(shape) > MAX_NDIM or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise CorruptStoreError(f"a schema holds the shape {str(shape)[:80]}")
    return tuple(shape)


# A builder takes the values of a sample's leaves, in order, and gives the sample.
Builder = Callable[[Sequence[Any]], Any]


def _builder(spec: Spec, shapes: Iterator[Dims | None], found: list[Column], depth: int) -> Builder:
    """Compiles a spec into a function from leaf values to sample, and appends its columns to ``found``."""
    if depth > MAX_DEPTH + 2:
        raise CorruptStoreError("a schema is nested too deeply")
    kind = spec[0]
    if kind in _EMPTY:
        value = _EMPTY[kind]
        return lambda values: value
    if kind in _CONTAINER_KINDS:
        return _container_builder(spec, shapes, found, depth)
    if len(found) >= MAX_COLUMNS:
        raise CorruptStoreError(f"a schema has more than {MAX_COLUMNS} leaves")
    position = len(found)
    found.append(_column(spec, next(shapes, None)))
    return lambda values: values[position]


def _container_builder(spec: Spec, shapes: Iterator[Dims | None], found: list[Column], depth: int) -> Builder:
    first = len(found)
    children = [_builder(child, shapes, found, depth + 1) for child in spec[-1]]
    make = _maker(spec)
    if any(child[0] in _EMPTY or child[0] in _CONTAINER_KINDS for child in spec[-1]):
        return lambda values: make([child(values) for child in children])
    # The common case, a container of leaves only, needs no call per child.
    last = len(found)
    if depth == 0:
        return make
    return lambda values: make(values[first:last])


def _maker(spec: Spec) -> Callable[[Sequence[Any]], Any]:
    """A function from the values of a container's children to the container."""
    kind = spec[0]
    if kind in _CONTAINERS:
        return _CONTAINERS[kind]
    if kind in _MAPPINGS:
        keys, mapping = tuple([_decode_key(key) for key in spec[1]]), _MAPPINGS[kind]
        if len(keys) != len(spec[-1]) or len(set(keys)) != len(keys):
            raise CorruptStoreError("a schema's dict has other keys than values")
        return lambda values: mapping(zip(keys, values, strict=True))
    return _namedtuple_maker(spec) if kind == "namedtuple" else _pil_maker(spec)


def _namedtuple_maker(spec: Spec) -> Callable[[Sequence[Any]], Any]:
    _, module, qualname, fields, children = spec
    cls = find_class(module, qualname)
    if not (isinstance(cls, type) and issubclass(cls, tuple) and getattr(cls, "_fields", None) == fields):
        raise UnsupportedSampleError(
            f"the store holds the namedtuple {module}.{qualname}{fields}, which is not among the imported modules; "
            f"import {module} before opening the store"
        )
    if len(fields) != len(children):
        raise CorruptStoreError("a schema's namedtuple has other fields than values")
    make = tuple.__new__
    return lambda values: make(cls, values)


def _pil_maker(spec: Spec) -> Callable[[Sequence[Any]], Any]:
    mode = spec[1]

    def make(values: Sequence[Any]) -> Any:
        from PIL import Image  # torchvision brings Pillow; text and audio users need neither

        width, height, data, palette, info, image_format = values
        image = Image.frombytes(mode, (width, height), data)
        if palette is not None:
            image.putpalette(palette[1], palette[0])
        image.info = info
        image.format = image_format
        return image

    return make


def _decode_key(key: Any) -> Any:
    if isinstance(key, str):
        return key
    tag, text = key
    decoders: dict[str, Callable[[Any], Any]] = {
        "int": int,
        "bool": lambda t: bool(int(t)),
        "float": float.fromhex,
        "none": lambda t: None,
        "bytes": bytes.fromhex,
        "tuple": lambda items: tuple([_decode_key(item) for item in items]),
    }
    return decoders[tag](text)


def _column(spec: Spec, shape: Dims | None) -> Column:
    kind = spec[0]
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        column = Column(kind, dtype, _TORCH_BY_NUMPY.get(dtype), 0, shape, dtype.itemsize)
    elif kind in _RAW:
        column = Column(kind, None, None, 1, shape, 1)
    elif kind == "tensor":
        column = _tensor_column(spec, shape)
    elif kind in ("ndarray", "npscalar"):
        column = _array_column(spec, shape)
    else:
        raise CorruptStoreError(f"a schema names the type {str(kind)[:80]!r}")
    if shape is not None and len(shape) != column.ndim:
        raise CorruptStoreError(f"a schema gives a {column.ndim}-dimensional leaf the shape {shape}")
    return column


def _tensor_column(spec: Spec, shape: Dims | None) -> Column:
    _, name, ndim, order, requires_grad = spec
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise CorruptStoreError(f"a schema names the dtype torch.{str(name)[:80]}, which this PyTorch does not have")
    if not (0 <= ndim <= MAX_NDIM and (order == () or sorted(order) == list(range(ndim)))):
        raise CorruptStoreError("a schema gives a tensor impossible dimensions")
    numpy_dtype = _NUMPY_BY_TORCH.get(dtype)
    return Column("tensor", numpy_dtype, dtype, ndim, shape, dtype.itemsize, order, bool(requires_grad))


def _array_column(spec: Spec, shape: Dims | None) -> Column:
    kind, descr, *rest = spec
    dtype = np.lib.format.descr_to_dtype(_as_descr(json.loads(descr)))
    if dtype.hasobject:
        raise CorruptStoreError(f"a schema names the dtype {dtype}, which holds Python objects")
    ndim, fortran = rest or (0, 0)
    if not 0 <= ndim <= MAX_NDIM:
        raise CorruptStoreError("a schema gives an array impossible dimensions")
    order = tuple(reversed(range(ndim))) if fortran else ()
    return Column(kind, dtype, _TORCH_BY_NUMPY.get(dtype), ndim, shape, dtype.itemsize, order)


def _as_descr(value: Any) -> Any:
    """NumPy writes fields as a list of tuples, of which JSON made lists."""
    if isinstance(value, list):
        return [tuple(_as_field(part) for part in item) for item in value]
    return value


def _as_field(part: Any) -> Any:
    if isinstance(part, list):
        # A title and name pair or a shape is a list of scalars; nested fields are a list of lists.
        return _as_descr(part) if part and isinstance(part[0], list) else tuple(part)
    return part
