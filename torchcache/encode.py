"""Values → (spec, leaves): which types a sample may hold, and exactly what is stored of each.

``objects`` has the types that are stored as parts of others. docs/fidelity.md lists them all.
"""

from __future__ import annotations

import json
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from torchcache.errors import UnsupportedSampleError
from torchcache.leaves import DTYPE_NAMES, MAX_DEPTH, NUMBER_DTYPES, Dims, Leaves, Spec
from torchcache.objects import Rule, rule_for, take_sparse
from torchcache.registry import Flatten, Registration, Unflatten, find_class, record, type_name
from torchcache.serial import contiguous

MAX_CHILDREN = 1024  # items of one container that become columns of their own
# Lists of numbers up to this length become one column an item, which batches gather; longer ones are one column.
FEW_ITEMS = 8

_INT64_MIN, _INT64_MAX = -(1 << 63), (1 << 63) - 1
# Quantized tensors carry scales beside their bytes, and the bits types cannot be looked into; neither is storable.
_OPAQUE_DTYPES = frozenset(d for d, name in DTYPE_NAMES.items() if name.startswith(("q", "bits")))
# Tensors of these dtypes become arrays without a detour through a uint8 view.
NUMPY_DTYPES = frozenset(
    {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
)
# Besides these, a list of plain data holds lists and dicts with strings as keys: what JSON holds.
_PLAIN_SCALARS = frozenset({str, int, float, bool, type(None)})
_PLAIN_TYPES = _PLAIN_SCALARS | {list, dict}

Encoder = Callable[[Any, Leaves, int], Spec]


def encode(value: Any, leaves: Leaves, depth: int) -> Spec:
    """Appends the leaves of a value, and returns its spec.

    Raises:
        UnsupportedSampleError: if it cannot be stored.
    """
    count = len(leaves)
    try:
        encoder = _ENCODERS.get(type(value)) or _resolve(type(value))
        return encoder(value, leaves, depth)
    except UnsupportedSampleError as error:
        if not leaves.allow_pickle:
            raise
        del leaves[count:]
        return _pickled(value, leaves, error)


def is_supported(value: Any) -> bool:
    try:
        encode(value, Leaves(), 0)
    except UnsupportedSampleError:
        return False
    return True


def register(cls: type, flatten: Flatten, unflatten: Unflatten) -> None:
    """Lets samples hold objects of a class of your own, after the fashion of PyTorch's pytree registration.

    Register in the module that defines the class, so that every process that uses it has registered it. It holds for
    exactly this class, not for its subclasses.

    Args:
        cls: the class.
        flatten: takes an object; returns its children, a sequence of values that can be stored, and a context: one
            more such value, ``None`` if none is needed.
        unflatten: takes the list of children and the context; returns the object.

    Raises:
        TypeError: if ``cls`` is no class, or one that torchcache stores as it is, or the others cannot be called.

    Example:
        >>> register(Scan, lambda scan: ([scan.volume], scan.spacing), lambda parts, spacing: Scan(*parts, spacing))
    """
    if not isinstance(cls, type):
        raise TypeError(f"register takes a class, not {cls!r}")
    for function in (flatten, unflatten):
        if not callable(function):
            raise TypeError(f"register({cls.__qualname__}) got {function!r}, which cannot be called")
    if cls in _BUILT_IN:
        raise TypeError(f"register({cls.__qualname__}): torchcache stores objects of this class exactly as it is")
    record(Registration(cls, flatten, unflatten))
    _ENCODERS.pop(cls, None)


def _resolve(cls: type) -> Encoder:
    """Finds the rule for a type that is met for the first time, and remembers it."""
    rule = rule_for(cls)
    if rule is not None:
        encoder = _encode_object(rule)
    elif issubclass(cls, tuple) and hasattr(cls, "_fields"):
        encoder = _encode_namedtuple
    elif issubclass(cls, np.generic):
        encoder = _encode_numpy_scalar
    elif cls is np.memmap:
        encoder = _encode_array
    else:
        # Not remembered: it may be registered yet.
        raise UnsupportedSampleError(f"{type_name(cls)} cannot be stored")
    _ENCODERS[cls] = encoder
    return encoder


def _pickled(value: Any, leaves: Leaves, reason: UnsupportedSampleError) -> Spec:
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # whatever the object's own code raises
        raise UnsupportedSampleError(f"{reason}, and cannot be pickled ({error})") from error
    leaves.append(((len(data),), data))
    return ("pickle",)


def _encode_object(rule: Rule) -> Encoder:
    def encode_object(x: Any, leaves: Leaves, depth: int) -> Spec:
        structure, parts = rule.take(x)
        if rule.kind == "pil":  # what a file's header says besides, and may say in objects of any kind
            parts = [{k: v for k, v in p.items() if is_supported(v)} if type(p) is dict else p for p in parts]
        return (rule.kind, structure, _encode_children(parts, leaves, depth))

    return encode_object


def _encode_tensor(x: torch.Tensor, leaves: Leaves, depth: int) -> Spec:
    dtype = x.dtype
    if x.layout is not torch.strided or x.device.type != "cpu" or dtype in _OPAQUE_DTYPES or x.is_nested:
        if x.device.type == "cpu" and not x.is_nested and x.is_sparse | (x.layout in _COMPRESSED):
            structure, parts = take_sparse(x)
            return ("sparse", structure, _encode_children(parts, leaves, depth))
        raise UnsupportedSampleError(f"a {x.layout} tensor of {dtype} on {x.device} cannot be stored")
    requires_grad = x.requires_grad
    if requires_grad:
        if not x.is_leaf:
            raise UnsupportedSampleError(
                "a tensor that is part of a graph (requires_grad, not a leaf) must be detached"
            )
        x = x.detach()
    dims = tuple(x.shape)
    order = _dense_order(x)
    if order:
        x = x.permute(order)
    if x.numel() == 0:
        leaves.append((dims, b""))
    else:
        x = contiguous(x).view(-1)
        data = x.numpy() if dtype in NUMPY_DTYPES else x.view(torch.uint8).numpy()
        leaves.append((dims, data.view(np.uint8)))
    return ("tensor", DTYPE_NAMES[dtype], len(dims), order, int(requires_grad))


def _dense_order(x: torch.Tensor) -> Dims:
    """The order of dimensions in memory if that is not the usual one, as for channels_last; else ``()``."""
    if x.is_contiguous() or x.numel() == 0:
        return ()
    strides = x.stride()
    order = tuple(sorted(range(x.ndim), key=lambda d: (-strides[d], d)))
    return order if order != tuple(range(x.ndim)) and x.permute(order).is_contiguous() else ()


def _encode_array(x: np.ndarray[Any, Any], leaves: Leaves, depth: int) -> Spec:
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


def _encode_numpy_scalar(x: np.generic, leaves: Leaves, depth: int) -> Spec:
    if x.dtype.hasobject:
        raise UnsupportedSampleError(f"a NumPy scalar of dtype {x.dtype} (a Python object) cannot be stored")
    leaves.append(((), x.tobytes()[: x.dtype.itemsize]))  # an empty string has no bytes, and gives some
    return ("npscalar", _descr(x.dtype))


def _descr(dtype: np.dtype[Any]) -> str:
    """A dtype as text, by NumPy's own file format: byte order, units, fields and padding included."""
    # Dtypes are equal, and of the same hash, whatever their metadata and the class of their scalars.
    return _descr_of(dtype, str(dtype.type), dtype.metadata is None)


@lru_cache(maxsize=4096)
def _descr_of(dtype: np.dtype[Any], scalar: str, bare: bool) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # of metadata, which the notation leaves out
            descr = np.lib.format.dtype_to_descr(dtype)
    except (UserWarning, ValueError) as error:
        raise UnsupportedSampleError(f"the NumPy dtype {dtype} cannot be written down ({error})") from None
    restored = np.lib.format.descr_to_dtype(descr)
    if restored != dtype or restored.type is not dtype.type:
        raise UnsupportedSampleError(f"the NumPy dtype {dtype!r} cannot be written down exactly")
    return json.dumps(descr, separators=(",", ":"))


def _encode_int(x: int, leaves: Leaves, depth: int) -> Spec:
    if _INT64_MIN <= x <= _INT64_MAX:
        leaves.append(((), x.to_bytes(8, "little", signed=True)))
        return ("int",)
    data = x.to_bytes(x.bit_length() // 8 + 1, "little", signed=True)
    leaves.append(((len(data),), data))
    return ("bigint",)


def _encode_fixed(kind: str, dtype: str) -> Encoder:
    make, spec = np.dtype(dtype).type, (kind,)

    def encode_fixed(x: Any, leaves: Leaves, depth: int) -> Spec:
        leaves.append(((), make(x).tobytes()))
        return spec

    return encode_fixed


def _encode_raw(kind: str, encode: Callable[[Any], bytes]) -> Encoder:
    spec = (kind,)

    def encode_raw(x: Any, leaves: Leaves, depth: int) -> Spec:
        data = encode(x)
        leaves.append(((len(data),), data))
        return spec

    return encode_raw


def _encode_constant(kind: str) -> Encoder:
    spec = (kind,)
    return lambda x, leaves, depth: spec


def _encode_children(values: Any, leaves: Leaves, depth: int) -> Spec:
    if depth >= MAX_DEPTH:
        raise UnsupportedSampleError(f"nested more than {MAX_DEPTH} levels deep, or contains itself")
    if len(values) > MAX_CHILDREN:
        raise UnsupportedSampleError(f"a container of {len(values)} items is too long; make it a tensor or an array")
    return tuple([encode(value, leaves, depth + 1) for value in values])


def _encode_sequence(kind: str) -> Encoder:
    def encode_sequence(x: Any, leaves: Leaves, depth: int) -> Spec:
        spec = _encode_whole(kind, x, leaves) if stored_whole(x) else None
        return spec or (kind, _encode_children(x, leaves, depth))

    return encode_sequence


def stored_whole(x: Sequence[Any]) -> bool:
    """Whether a list or tuple is worth storing as one leaf, if it is plain data: a long one, or one of containers.

    One column an item would give every length a schema of its own, and a list of annotations one to nearly each.
    """
    types = set(map(type, x))
    if type(x) is tuple:
        return len(x) > FEW_ITEMS and len(types) == 1 and types.pop().__name__ in NUMBER_DTYPES
    return types <= _PLAIN_TYPES and (len(x) > FEW_ITEMS or not types <= _PLAIN_SCALARS)


def _encode_whole(kind: str, x: Sequence[Any], leaves: Leaves) -> Spec | None:
    """Stores a list or tuple as one leaf; ``None`` if that cannot be done exactly."""
    types = set(map(type, x))
    number = types.pop().__name__ if len(types) == 1 else ""
    if number in NUMBER_DTYPES:
        try:
            data = np.array(x, NUMBER_DTYPES[number])
        except OverflowError:
            return _encode_json(x, leaves) if kind == "list" else None
        leaves.append((data.shape, data.view(np.uint8)))
        return (f"{kind}of", number)
    return _encode_json(x, leaves) if kind == "list" else None


def _encode_json(x: Any, leaves: Leaves) -> Spec | None:
    """Stores plain data as JSON; ``None`` if some of it would not come back exactly."""
    if not _is_plain(x, 0):
        return None
    try:
        data = json.dumps(x, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
    except ValueError:  # a NaN, an infinity, a lone surrogate, an integer of thousands of digits
        return None
    leaves.append(((len(data),), data))
    return ("json",)


def _is_plain(x: Any, depth: int) -> bool:
    if type(x) is dict:
        if set(map(type, x)) - {str}:
            return False
        x = x.values()
    types = set(map(type, x))
    if types <= _PLAIN_SCALARS:
        return True
    return (
        types <= _PLAIN_TYPES
        and depth < MAX_DEPTH
        and all(type(item) in _PLAIN_SCALARS or _is_plain(item, depth + 1) for item in x)
    )


def _encode_mapping(kind: str) -> Encoder:
    def encode_mapping(x: Any, leaves: Leaves, depth: int) -> Spec:
        spec = _encode_json(x, leaves) if kind == "dict" and len(x) > MAX_CHILDREN else None
        return spec or (kind, tuple([_encode_key(key) for key in x]), _encode_children(x.values(), leaves, depth))

    return encode_mapping


def _encode_namedtuple(x: Any, leaves: Leaves, depth: int) -> Spec:
    cls = type(x)
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise UnsupportedSampleError(f"the namedtuple {type_name(cls)} cannot be found by that name")
    return ("namedtuple", cls.__module__, cls.__qualname__, tuple(cls._fields), _encode_children(x, leaves, depth))


_COMPRESSED = frozenset({torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc})
_ENCODERS: dict[type, Encoder] = {
    torch.Tensor: _encode_tensor,
    np.ndarray: _encode_array,
    bool: _encode_fixed("bool", "<u1"),
    int: _encode_int,
    float: _encode_fixed("float", "<f8"),
    complex: _encode_fixed("complex", "<c16"),
    str: _encode_raw("str", lambda x: x.encode("utf-8", "surrogatepass")),
    bytes: _encode_raw("bytes", lambda x: x),
    bytearray: _encode_raw("bytearray", bytes),
    type(None): _encode_constant("none"),
    type(...): _encode_constant("ellipsis"),
    tuple: _encode_sequence("tuple"),
    list: _encode_sequence("list"),
    torch.Size: lambda x, leaves, depth: ("size", _encode_children(x, leaves, depth)),
    dict: _encode_mapping("dict"),
    OrderedDict: _encode_mapping("odict"),
}
_BUILT_IN = frozenset(_ENCODERS)


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
    raise UnsupportedSampleError(f"a dict key of {type_name(cls)} cannot be stored")
