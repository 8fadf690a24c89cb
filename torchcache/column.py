"""One leaf of every sample: what it is, and how its bytes become a value again."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from torchcache import memory
from torchcache.errors import CorruptStoreError
from torchcache.leaves import DTYPE_NAMES, NUMBER_DTYPES, Dims, Spec

MAX_NDIM = 64  # dimensions of a tensor or array (NumPy's own limit)
RAGGED_ALIGN = 16  # bytes; the largest item size there is (complex128), so that every view is aligned

_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_SCALARS = {**NUMBER_DTYPES, "complex": "<c16"}
_RAW = frozenset({"str", "bytes", "bytearray", "bigint", "json", "pickle"})
_WIDE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
_NUMBERS = frozenset({"listof", "tupleof"})

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
    def wide_dtype(self) -> torch.dtype:
        """A dtype of ``unit`` bytes, as which a gather copies: bits are bits, whichever dtype carries them."""
        return _WIDE[self.unit]

    @property
    def wide_shape(self) -> Dims:
        """The shape of a value of a fixed column when its bytes are taken as elements of ``wide_dtype``."""
        assert self.shape is not None
        return (*self.shape[:-1], self.shape[-1] * self.itemsize // self.unit) if self.shape else ()

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
        if self.kind in _NUMBERS:
            return array.tolist() if self.kind == "listof" else tuple(array.tolist())
        if self.kind == "npscalar" and array.dtype.kind in "SU":
            return _numpy_text(array.dtype.kind, array.tobytes()[: self.itemsize])
        value = array[()]
        return value if self.kind == "npscalar" else value.item()

    def _array(self, buffer: Any, offset: int, shape: Dims, copy: bool) -> np.ndarray[Any, Any]:
        array = self._stored(buffer, offset, shape)
        if copy:
            array = array.copy()
        return array.transpose(self.axes) if self.order else array

    def _stored(self, buffer: Any, offset: int, shape: Dims) -> np.ndarray[Any, Any]:
        """A view with the dimensions in their order in memory."""
        array: np.ndarray[Any, Any] = np.ndarray(self.stored_shape(shape), self.numpy_dtype or np.uint8, buffer, offset)
        return array

    def stored_shape(self, shape: Dims) -> Dims:
        """The shape of a value with its dimensions in their order in memory."""
        return tuple([shape[d] for d in self.order]) if self.order else shape

    @property
    def axes(self) -> Dims:
        """Which of the dimensions in memory each dimension of a value is, where there is an ``order``."""
        return tuple(np.argsort(self.order).tolist())

    def _decode_tensor(self, buffer: Any, offset: int, shape: Dims, copy: bool) -> torch.Tensor:
        if self.numpy_dtype is not None:
            stored = self._stored(buffer, offset, shape)
            tensor = memory.copied(stored) if copy else torch.from_numpy(stored)
        else:
            nbytes = self.nbytes(shape)
            if nbytes == 0:  # NumPy's empty arrays have strides that torch does not reinterpret
                return torch.empty(shape, dtype=self.torch_dtype, device="cpu", requires_grad=self.requires_grad)
            array: np.ndarray[Any, Any] = np.ndarray((nbytes,), np.uint8, buffer, offset)
            assert self.torch_dtype is not None
            flat = (memory.copied(array) if copy else torch.from_numpy(array)).view(self.torch_dtype)
            tensor = flat.view(self.stored_shape(shape))
        if self.order:
            tensor = tensor.permute(self.axes)
        return tensor.requires_grad_() if self.requires_grad else tensor


def _numpy_text(kind: str, data: bytes) -> Any:
    """NumPy's scalar of text or bytes, with the zeros at its end that an array would take for padding."""
    return np.bytes_(data) if kind == "S" else np.str_(data.decode("utf-32-le", "surrogatepass"))


def _decode_raw(kind: str, data: bytes) -> Any:
    if kind == "str":
        return data.decode("utf-8", "surrogatepass")
    if kind == "json":
        return json.loads(data)
    if kind == "pickle":  # ``Schema.from_json`` refuses it unless the user has allowed it
        return pickle.loads(data)
    if kind == "bigint":
        return int.from_bytes(data, "little", signed=True)
    return bytearray(data) if kind == "bytearray" else data


def column_of(spec: Spec, shape: Dims | None) -> Column:
    """The column of a leaf.

    Raises:
        CorruptStoreError: if the spec, from a file, names no leaf.
    """
    kind = spec[0]
    if kind in _SCALARS:
        dtype = np.dtype(_SCALARS[kind])
        column = Column(kind, dtype, _TORCH_BY_NUMPY.get(dtype), 0, shape, dtype.itemsize)
    elif kind in _NUMBERS:
        dtype = np.dtype(NUMBER_DTYPES[spec[1]])
        column = Column(kind, dtype, _TORCH_BY_NUMPY[dtype], 1, shape, dtype.itemsize)
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
