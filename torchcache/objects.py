"""Objects that are stored as parts: how each class is taken apart, and how it is put together again.

A *rule* has a ``take``, which gives of an object what belongs to the structure (strings and integers, part of the spec)
and the parts (values that can be stored, which differ from sample to sample); and a ``make``, which from the former
makes the function that turns the parts into an object.

Classes of a user's own are found by name among those that the process has imported; their ``__init__`` is not called.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import sys
import uuid
from collections import OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from torchcache.errors import UnsupportedSampleError
from torchcache.registry import find_class, registration, type_name

Structure = tuple[Any, ...]
Taken = tuple[Structure, Sequence[Any]]
Make = Callable[[Sequence[Any]], Any]


class Rule(NamedTuple):
    """How the objects of a class are stored.

    Attributes:
        kind: name of the rule in a spec.
        take: object → (structure, parts).
        make: structure → (parts → object).
    """

    kind: str
    take: Callable[[Any], Taken]
    make: Callable[..., Make]


def rule_for(cls: type) -> Rule | None:
    """The rule for a class, if there is one."""
    if registration(cls.__module__, cls.__qualname__) is not None:
        return RULES["registered"]
    if cls in _BY_CLASS:
        return _BY_CLASS[cls]
    for kind, applies in _BY_PREDICATE.items():
        if applies(cls):
            return RULES[kind]
    return None


def _class_name(cls: type) -> tuple[str, str]:
    if find_class(cls.__module__, cls.__qualname__) is not cls:
        raise UnsupportedSampleError(f"{type_name(cls)} cannot be found by that name; define it in a module")
    return cls.__module__, cls.__qualname__


def imported_class(module: str, qualname: str, is_meant: Callable[[type], bool]) -> Any:
    """The class that a store names.

    Raises:
        UnsupportedSampleError: if it has not been imported, or is not what is meant.
    """
    cls = find_class(module, qualname)
    if cls is None or not is_meant(cls):
        raise UnsupportedSampleError(
            f"the store holds objects of {module}.{qualname}, which is not among the imported modules, or is another "
            f"class now; import {module} before opening the store, or fill another one"
        )
    return cls


def _as_parts(*names: str) -> Callable[[Any], Taken]:
    return lambda x: ((), [getattr(x, name) for name in names])


def _called(cls: Callable[..., Any]) -> Callable[[], Make]:
    return lambda: lambda parts: cls(*parts)


_FACTORIES = {
    f.__name__: f for f in (list, dict, set, frozenset, tuple, int, float, bool, str, bytes, OrderedDict, deque)
}


def _take_defaultdict(x: defaultdict[Any, Any]) -> Taken:
    factory: Any = x.default_factory
    name = getattr(factory, "__name__", "") if factory is not None else ""
    if factory is not None and _FACTORIES.get(name) is not factory:
        raise UnsupportedSampleError(f"a defaultdict that makes {factory!r} cannot be stored; use a plain dict")
    return (name,), [dict(x)]


def _make_defaultdict(name: str) -> Make:
    factory = _FACTORIES[name] if name else None
    return lambda parts: defaultdict(factory, parts[0])


def _take_deque(x: deque[Any]) -> Taken:
    return (-1 if x.maxlen is None else x.maxlen,), [list(x)]


def _make_deque(maxlen: int) -> Make:
    return lambda parts: deque(parts[0], None if maxlen < 0 else maxlen)


def _take_zone(tzinfo: datetime.tzinfo | None) -> tuple[Any, ...]:
    if tzinfo is None:
        return ()
    if type(tzinfo) is not datetime.timezone:
        raise UnsupportedSampleError(f"a time in the zone {tzinfo!r} cannot be stored; convert it to UTC")
    offset, *name = tzinfo.__getinitargs__()  # type: ignore[attr-defined]
    return (offset // datetime.timedelta(microseconds=1), *name)


def _make_zone(zone: Sequence[Any]) -> datetime.timezone | None:
    return datetime.timezone(datetime.timedelta(microseconds=zone[0]), *zone[1:]) if zone else None


def _take_time(x: Any) -> Taken:
    return _take_zone(x.tzinfo), [x.replace(tzinfo=None).isoformat(), x.fold]


def _make_time(cls: Any) -> Callable[..., Make]:
    def make(*zone: Any) -> Make:
        tzinfo = _make_zone(zone)
        return lambda parts: cls.fromisoformat(parts[0]).replace(tzinfo=tzinfo, fold=parts[1])

    return make


_PATHS = {cls.__name__: cls for cls in (type(pathlib.Path()), pathlib.PurePosixPath, pathlib.PureWindowsPath)}


def _make_path(name: str) -> Make:
    cls = _PATHS[name]
    return lambda parts: cls(parts[0])


def _take_enum(x: enum.Enum) -> Taken:
    cls = type(x)
    name = x.name if cls.__members__.get(x.name or "") is x else None
    if name is None and not isinstance(x, enum.Flag):
        raise UnsupportedSampleError(f"{x!r} is not a member of {type_name(cls)}")
    return _class_name(cls), [x.value if name is None else name]


def _make_enum(module: str, qualname: str) -> Make:
    cls = imported_class(module, qualname, lambda cls: issubclass(cls, enum.Enum))
    members = dict(cls.__members__)
    # A combination of flags has no name of its own.
    return lambda parts: cls(parts[0]) if type(parts[0]) is int else members[parts[0]]


def _is_plain_dataclass(cls: type) -> bool:
    """Whether objects of a dataclass are nothing but their fields."""
    if not dataclasses.is_dataclass(cls) or cls.__new__ is not object.__new__:
        return False
    return _slots(cls) <= {field.name for field in dataclasses.fields(cls)}


def _slots(cls: type) -> set[str]:
    slots = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    return {name for s in slots for name in ((s,) if isinstance(s, str) else s)} - {"__dict__", "__weakref__"}


def _take_dataclass(x: Any) -> Taken:
    names = tuple([field.name for field in dataclasses.fields(x)])
    if not set(names).issuperset(getattr(x, "__dict__", ())) or not all(hasattr(x, name) for name in names):
        raise UnsupportedSampleError(
            f"this {type_name(type(x))} has other attributes than its fields; torchcache.register says how to store it"
        )
    return (*_class_name(type(x)), names), [getattr(x, name) for name in names]


def _make_dataclass(module: str, qualname: str, names: Structure) -> Make:
    def has_fields(cls: type) -> bool:
        return _is_plain_dataclass(cls) and tuple([field.name for field in dataclasses.fields(cls)]) == names

    cls = imported_class(module, qualname, has_fields)

    def make(parts: Sequence[Any]) -> Any:
        x = object.__new__(cls)
        for name, part in zip(names, parts, strict=True):
            object.__setattr__(x, name, part)  # also where the class is frozen
        return x

    return make


def _is_user_container(cls: type) -> bool:
    return issubclass(cls, (UserDict, UserList)) and cls.__new__ is object.__new__ and not _slots(cls)


def _take_state(x: Any) -> Taken:
    return _class_name(type(x)), [dict(vars(x))]


def _make_state(module: str, qualname: str) -> Make:
    cls = imported_class(module, qualname, _is_user_container)

    def make(parts: Sequence[Any]) -> Any:
        x = object.__new__(cls)
        x.__dict__.update(parts[0])
        return x

    return make


def _take_registered(x: Any) -> Taken:
    cls = type(x)
    found = registration(cls.__module__, cls.__qualname__)
    assert found is not None
    children, context = found.flatten(x)
    return (cls.__module__, cls.__qualname__), [list(children), context]


def _make_registered(module: str, qualname: str) -> Make:
    found = registration(module, qualname)
    if found is None:
        raise UnsupportedSampleError(
            f"the store holds objects of {module}.{qualname}, for which this process has registered nothing; call "
            f"torchcache.register before opening the store"
        )
    return lambda parts: found.unflatten(parts[0], parts[1])


def _take_masked(x: Any) -> Taken:
    mask = np.ma.getmask(x)
    fill = vars(x)["_fill_value"]  # what was set, where ``fill_value`` sets it
    return (int(x.hardmask),), [x.data, None if mask is np.ma.nomask else mask, fill]


def _make_masked(hard: int) -> Make:
    def make(parts: Sequence[Any]) -> Any:
        data, mask, fill = parts
        x = np.ma.MaskedArray(data, np.ma.nomask if mask is None else mask, hard_mask=bool(hard))
        vars(x)["_fill_value"] = fill
        return x

    return make


_LAYOUTS = {
    str(layout).removeprefix("torch."): layout
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
}
_BY_ROW = ("sparse_csr", "sparse_bsr")


def take_sparse(x: torch.Tensor) -> Taken:
    """Takes a sparse tensor apart: its indices and its values, as they are."""
    layout = str(x.layout).removeprefix("torch.")
    if x.requires_grad or layout not in _LAYOUTS:
        raise UnsupportedSampleError(
            f"a {x.layout} tensor of {x.dtype} (requires_grad={x.requires_grad}) cannot be stored"
        )
    size = list(x.shape)
    if layout == "sparse_coo":
        return (layout, int(x.is_coalesced())), [x._indices(), x._values(), size]
    if layout in _BY_ROW:
        return (layout, 0), [x.crow_indices(), x.col_indices(), x.values(), size]
    return (layout, 0), [x.ccol_indices(), x.row_indices(), x.values(), size]


def _make_sparse(name: str, coalesced: int) -> Make:
    layout = _LAYOUTS[name]

    # Checked: PyTorch trusts indices, and these come from a file.
    def make(parts: Sequence[Any]) -> Any:
        if layout is torch.sparse_coo:
            indices, values, size = parts
            return torch.sparse_coo_tensor(
                indices, values, size, is_coalesced=bool(coalesced), device="cpu", check_invariants=True
            )
        compressed, plain, values, size = parts
        return torch.sparse_compressed_tensor(
            compressed, plain, values, size, layout=layout, device="cpu", check_invariants=True
        )

    return make


def _is_tensor_subclass(cls: type) -> bool:
    """Whether it is a tensor with attributes; one that handles its own operations may be anything."""
    dispatch = getattr(cls, "__torch_dispatch__", None)
    return issubclass(cls, torch.Tensor) and dispatch is torch.Tensor.__torch_dispatch__


def _take_subclass(x: torch.Tensor) -> Taken:
    with torch._C.DisableTorchFunctionSubclass():
        if x.requires_grad and not x.is_leaf:
            raise UnsupportedSampleError(
                "a tensor that is part of a graph (requires_grad, not a leaf) must be detached"
            )
        plain = x.detach().as_subclass(torch.Tensor)
        return (*_class_name(type(x)), int(x.requires_grad)), [plain, dict(x.__dict__)]


def _make_subclass(module: str, qualname: str, requires_grad: int) -> Make:
    cls = imported_class(module, qualname, _is_tensor_subclass)

    def make(parts: Sequence[Any]) -> Any:
        tensor, attributes = parts
        x = tensor.as_subclass(cls)
        x.__dict__.update(attributes)
        with torch._C.DisableTorchFunctionSubclass():
            return x.requires_grad_() if requires_grad else x

    return make


def _take_pil(x: Any) -> Taken:
    x.load()  # a lazily opened file keeps its descriptor, and its pixels may be gone by the time they are read
    palette = None
    if x.palette is not None:
        palette = (x.palette.mode, bytes(x.getpalette(x.palette.mode)))
    info = {key: value for key, value in x.info.items() if type(key) is str}
    return (x.mode,), [*x.size, x.tobytes(), palette, info, x.format]


def _make_pil(mode: str) -> Make:
    def make(parts: Sequence[Any]) -> Any:
        from PIL import Image  # torchvision brings Pillow; text and audio users need neither

        width, height, data, palette, info, image_format = parts
        image = Image.frombytes(mode, (width, height), data)
        if palette is not None:
            image.putpalette(palette[1], palette[0])
        image.info = info
        image.format = image_format
        return image

    return make


def _is_pil(cls: type) -> bool:
    return "PIL.Image" in sys.modules and issubclass(cls, sys.modules["PIL.Image"].Image)


_BY_CLASS: dict[type, Rule] = {
    set: Rule("set", lambda x: ((), [list(x)]), _called(set)),
    frozenset: Rule("frozenset", lambda x: ((), [list(x)]), _called(frozenset)),
    deque: Rule("deque", _take_deque, _make_deque),
    defaultdict: Rule("defaultdict", _take_defaultdict, _make_defaultdict),
    slice: Rule("slice", _as_parts("start", "stop", "step"), _called(slice)),
    range: Rule("range", _as_parts("start", "stop", "step"), _called(range)),
    datetime.date: Rule("date", lambda x: ((), [x.isoformat()]), _called(datetime.date.fromisoformat)),
    datetime.time: Rule("time", _take_time, _make_time(datetime.time)),
    datetime.datetime: Rule("datetime", _take_time, _make_time(datetime.datetime)),
    datetime.timedelta: Rule("timedelta", _as_parts("days", "seconds", "microseconds"), _called(datetime.timedelta)),
    decimal.Decimal: Rule("decimal", lambda x: ((), [str(x)]), _called(decimal.Decimal)),
    fractions.Fraction: Rule("fraction", _as_parts("numerator", "denominator"), _called(fractions.Fraction)),
    uuid.UUID: Rule("uuid", _as_parts("bytes"), _called(lambda data: uuid.UUID(bytes=data))),
    np.ma.MaskedArray: Rule("masked", _take_masked, _make_masked),
}
_PATH = Rule("path", lambda x: ((type(x).__name__,), [str(x)]), _make_path)
_BY_CLASS.update(dict.fromkeys(_PATHS.values(), _PATH))

RULES = {rule.kind: rule for rule in _BY_CLASS.values()} | {
    "registered": Rule("registered", _take_registered, _make_registered),
    "enum": Rule("enum", _take_enum, _make_enum),
    "dataclass": Rule("dataclass", _take_dataclass, _make_dataclass),
    "state": Rule("state", _take_state, _make_state),
    "sparse": Rule("sparse", take_sparse, _make_sparse),
    "subclass": Rule("subclass", _take_subclass, _make_subclass),
    "pil": Rule("pil", _take_pil, _make_pil),
}
_BY_PREDICATE: dict[str, Callable[[type], bool]] = {
    "enum": lambda cls: issubclass(cls, enum.Enum),
    "subclass": _is_tensor_subclass,
    "pil": _is_pil,
    "dataclass": _is_plain_dataclass,
    "state": _is_user_container,
}
