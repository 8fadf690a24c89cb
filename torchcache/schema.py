"""(spec, leaves) → sample: the schema of a block, its columns, and how a sample is put together again.

A *schema* is a spec (see ``flatten``) together with the shapes that are the same for every sample of a block; a
leaf whose shape it does not fix is *ragged*. One *column* of a block holds one leaf of every sample.

Nothing here executes what a file says: a class is found by name among the modules that the process has already
imported, never imported for the purpose, and none but that class is called.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from torchcache.column import MAX_NDIM, Column, column_of
from torchcache.errors import CorruptStoreError, UnsupportedSampleError
from torchcache.leaves import MAX_DEPTH, Dims, Spec
from torchcache.objects import RULES, imported_class

MAX_COLUMNS = 65_536  # leaves of one sample; more is a hostile file

_EMPTY: dict[str, Any] = {"none": None, "ellipsis": ...}
_CONTAINERS: dict[str, Callable[[Sequence[Any]], Any]] = {"tuple": tuple, "list": list, "size": torch.Size}
_MAPPINGS: dict[str, type[dict[Any, Any]]] = {"dict": dict, "odict": OrderedDict}
_CONTAINER_KINDS = frozenset({*_CONTAINERS, *_MAPPINGS, "namedtuple", *RULES})


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
    def from_json(cls, text: bytes, *, allow_pickle: bool = False, layout_only: bool = False) -> Schema:
        """Reads what ``to_json`` wrote.

        Args:
            text: the JSON.
            allow_pickle: accept a schema whose samples execute what is stored when they are read.
            layout_only: for somebody who wants the columns alone, and has not imported the classes of the samples:
                every container is a tuple.

        Raises:
            CorruptStoreError: for anything else, whatever it is.
        """
        try:
            parsed = json.loads(text)
            shapes = tuple([None if s is None else _checked_shape(s) for s in parsed["shapes"]])
            spec = _as_tuples(parsed["spec"], 0)
            schema = cls(_layout(spec) if layout_only else spec, shapes)
        except (CorruptStoreError, UnsupportedSampleError):
            raise
        except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, OverflowError) as error:
            raise CorruptStoreError(f"a schema cannot be read ({type(error).__name__}: {error})") from error
        if not allow_pickle and any(column.kind == "pickle" for column in schema.columns):
            raise CorruptStoreError("a schema holds pickled objects where none are allowed")
        return schema


class Part(NamedTuple):
    """What ``default_collate`` finds in a sample when it has taken the containers apart: a leaf, or an object.

    Attributes:
        first, last: the columns, the last exclusive.
        schema: of an object its own; ``None`` for a leaf.
    """

    first: int
    last: int
    schema: Schema | None


def outline(schema: Schema) -> tuple[Callable[[Sequence[Any]], Any], list[Part]]:
    """The containers of a sample down to its leaves and objects: a function that fills them, and what it takes."""
    parts: list[Part] = []
    spec = _outline(schema.spec, schema.shapes, parts)
    return Schema(spec, (None,) * len(parts)).rebuild, parts


def _outline(spec: Spec, shapes: Sequence[Dims | None], parts: list[Part]) -> Spec:
    kind = spec[0]
    if kind in _EMPTY:
        return spec
    if kind in _CONTAINER_KINDS and kind not in RULES:
        return (*spec[:-1], tuple([_outline(child, shapes, parts) for child in spec[-1]]))
    first = parts[-1].last if parts else 0
    last = first + _count_leaves(spec)
    parts.append(Part(first, last, Schema(spec, tuple(shapes[first:last])) if kind in RULES else None))
    return ("bytes",)


def _count_leaves(spec: Spec) -> int:
    if spec[0] in _EMPTY:
        return 0
    return sum(map(_count_leaves, spec[-1])) if spec[0] in _CONTAINER_KINDS else 1


def _as_tuples(value: Any, depth: int) -> Any:
    if depth > 3 * MAX_DEPTH:
        raise CorruptStoreError("a schema is nested too deeply")
    return tuple([_as_tuples(item, depth + 1) for item in value]) if isinstance(value, list) else value


def _layout(spec: Spec) -> Spec:
    """The leaves of a spec, in the same order, in tuples."""
    return ("tuple", tuple(map(_layout, spec[-1]))) if spec[0] in _CONTAINER_KINDS else spec


def leaf_names(text: bytes) -> list[str]:
    """Where each leaf of a schema, as JSON, is in a sample, in the order of the columns: ``['label']``, ``[0].x``."""
    return list(_leaf_names(_as_tuples(json.loads(text)["spec"], 0), ""))


def _leaf_names(spec: Spec, place: str) -> Iterator[str]:
    if spec[0] in _EMPTY:
        return
    if spec[0] not in _CONTAINER_KINDS:
        yield place or "sample"
        return
    children = spec[-1]
    parts = [f"[{i}]" for i in range(len(children))]
    if spec[0] in _MAPPINGS:
        parts = [f"[{_decode_key(key)!r}]" for key in spec[1]]
    elif spec[0] in ("namedtuple", "dataclass"):
        fields = spec[3] if spec[0] == "namedtuple" else spec[1][2]
        parts = [f".{field}" for field in fields]
    for part, child in zip(parts, children, strict=True):
        yield from _leaf_names(child, place + part)


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
    found.append(column_of(spec, next(shapes, None)))
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
    return _namedtuple_maker(spec) if kind == "namedtuple" else _object_maker(spec)


def _namedtuple_maker(spec: Spec) -> Callable[[Sequence[Any]], Any]:
    _, module, qualname, fields, children = spec
    cls = imported_class(
        module, qualname, lambda cls: issubclass(cls, tuple) and getattr(cls, "_fields", None) == fields
    )
    if len(fields) != len(children):
        raise CorruptStoreError("a schema's namedtuple has other fields than values")
    make = tuple.__new__
    return lambda values: make(cls, values)


def _object_maker(spec: Spec) -> Callable[[Sequence[Any]], Any]:
    kind, structure, _ = spec
    make = RULES[kind].make(*structure)
    if kind == "registered":
        return make  # the user's own code, whose errors are the user's

    def make_object(parts: Sequence[Any]) -> Any:
        try:
            return make(parts)
        except (ValueError, TypeError, KeyError, OverflowError, RuntimeError, ArithmeticError) as error:
            raise CorruptStoreError(f"a {kind} cannot be made of what is stored ({error})") from error

    return make_object


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
