"""One walk over an object: what was met, what is underway, what is left out; long lists in bulk."""

from __future__ import annotations

import itertools
import pathlib
import types
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from torchcache import bytecode, serial
from torchcache.digest import ATOMS, CHUNK_BYTES, SMALL_BYTES, condense, hash_of, number
from torchcache.errors import FingerprintError
from torchcache.packages import package_of

BULK_ROWS = 256  # longer lists of equal rows are hashed column by column, shorter ones element by element
LISTED_ELEMENTS = 64  # elements of one container that `explain` lists
LONGEST_INT_BITS = 256  # that `explain` writes out: Python refuses to do so from some 14,000 on
OMITTED = "left out"


class Walk:
    """One walk over an object. Methods take an object and the path by which a message would name it.

    Args:
        rule_of: how objects of a type are identified.
        parts: what `explain` lists, to be filled; None if it does not.
        underway: the objects around this one.
    """

    def __init__(
        self, rule_of: Callable[[type], Rule], parts: dict[str, str] | None, underway: dict[int, int] | None = None
    ) -> None:
        self.rule_of = rule_of
        self.parts = parts
        self.quiet = 0
        self.known: dict[int, tuple[object, bytes]] = {}  # by id; holds the object, or its id could be used again
        self.underway: dict[int, int] = dict(underway or {})  # id to depth, of the objects around this one
        self.sources: dict[str, bytes] = {}  # of whole modules, by name
        self.rules: dict[type, Rule] = {}

    def digest(self, obj: Any, path: str) -> bytes:
        kind = type(obj)
        encode = ATOMS.get(kind)
        if encode is not None:
            result = hash_of(kind.__name__, encode(obj))
        elif id(obj) in self.known:
            result = self.known[id(obj)][1]
        elif id(obj) in self.underway:
            return hash_of("cycle", number(len(self.underway) - self.underway[id(obj)]))
        else:
            self.note(path, "")  # its line comes above those of what it holds
            self.underway[id(obj)] = len(self.underway)
            try:
                rule = self.rules.get(kind) or self.rules.setdefault(kind, self.rule_of(kind))
                result = rule(self, obj, path)
            finally:
                del self.underway[id(obj)]
            if result != hash_of(OMITTED):  # its reason is listed wherever it is met
                self.known[id(obj)] = (obj, result)
        if self.parts is not None and (path in self.parts or not isinstance(obj, type)):  # a class is listed once
            self.note(path, describe(obj, result))
        return result

    def note(self, path: str, what: str) -> None:
        if self.parts is not None and not self.quiet and not self.parts.get(path, "").startswith(OMITTED):
            self.parts[path] = what

    def leave_out(self, path: str, why: str) -> bytes:
        self.note(path, f"{OMITTED}: {why}")
        return hash_of(OMITTED)

    def alone(self) -> Walk:
        """A walk from here that neither sees nor leaves behind what other branches have met."""
        return Walk(self.rule_of, None, self.underway)

    def column(self, values: Sequence[Any], path: str) -> bytes:
        """Digest of many values, in bulk where all are of one plain type: some 20 times as fast as one by one."""
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else type(None)
        if kind is str:
            text = "".join(values).encode("utf-8", "surrogatepass")
            return hash_of("strings", condense(array("q", map(len, values))), condense(text))
        if kind is int or kind is float:
            try:
                return hash_of(f"{kind.__name__}s", condense(array("q" if kind is int else "d", values)))
            except OverflowError:
                pass  # integers beyond 64 bits go one by one
        if len(values) < BULK_ROWS:
            return self.elements(values, path)
        if kind is tuple and len(set(map(len, values))) == 1:
            columns = [self.column([row[i] for row in values], f"{path}[:][{i}]") for i in range(len(values[0]))]
            return hash_of("rows", *columns)
        if kind is dict and len(set(map(tuple, values))) == 1:
            columns = [self.column([row[key] for row in values], f"{path}[:][{key!r}]") for key in values[0]]
            return hash_of("records", self.column(list(values[0]), path), *columns)
        if kind is list and set(map(type, itertools.chain.from_iterable(values))) <= ATOMS.keys():
            flat = list(itertools.chain.from_iterable(values))
            return hash_of("ragged", condense(array("q", map(len, values))), self.column(flat, path))
        if kind in (np.ndarray, torch.Tensor) and (width := uniform_bytes(values)):
            stack: Callable[[Any], Any] = np.stack if kind is np.ndarray else _stack_tensors
            rows = max(1, CHUNK_BYTES // width)
            chunks = (stack(values[start : start + rows]) for start in range(0, len(values), rows))
            return hash_of("stack", *[self.rule_of(kind)(self, chunk, path) for chunk in chunks])
        if issubclass(kind, pathlib.PurePath):
            return hash_of("paths", self.digest(kind, path), self.column(list(map(str, values)), path))
        return self.elements(values, path)

    def elements(self, values: Sequence[Any], path: str) -> bytes:
        digests = [self.digest(value, f"{path}[{i}]") for i, value in enumerate(values[:LISTED_ELEMENTS])]
        self.quiet += 1
        digests += [self.digest(values[i], f"{path}[{i}]") for i in range(LISTED_ELEMENTS, len(values))]
        self.quiet -= 1
        return hash_of("elements", *digests)

    def state(self, obj: Any, state: Any, path: str) -> bytes:
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0] or {}, dict) and type(state[1]) is dict:
            state = {**(state[0] or {}), **state[1]}  # attributes of __dict__ and of __slots__
        if not isinstance(state, dict):
            return self.digest(state, path)
        kind: Any = type(obj)
        drift = bytecode.drift(kind)
        parts = []
        for name in sorted(state, key=str):
            content = self.unless_drifting(state[name], f"{path}.{name}", drift.get(name))
            if content is not None:
                parts += [str(name).encode("utf-8", "surrogatepass"), content]
        return hash_of("state", *parts)

    def unless_drifting(self, value: Any, path: str, reason: str | None) -> bytes | None:
        """The digest of what a name stands for; None if it is left out, as if the name were not there."""
        if reason is None:
            return self.digest(value, path)
        if reason == bytecode.OPENED and value is not None:
            try:
                return self.alone().digest(value, path)
            except FingerprintError:
                pass  # a handle, which the reading method can open again from the rest of the state
        self.leave_out(path, reason)
        return None


Rule = Callable[[Walk, Any, str], bytes]


def refusal(obj: Any, path: str, why: str) -> FingerprintError:
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    return FingerprintError(
        f"{path} ({kind}) cannot be identified: {why}. Pass key= to name the dataset's content yourself, or give the "
        "class that holds it a __getstate__ or __fingerprint__ method that leaves it out."
    )


def _stack_tensors(values: Sequence[torch.Tensor]) -> torch.Tensor:
    return serial.stack([value.detach() for value in values]).requires_grad_(values[0].requires_grad)


def uniform_bytes(values: Sequence[Any]) -> int:
    """Bytes of each of many small arrays or tensors that can be stacked; 0 if they cannot."""
    first, alike = values[0], set[Any]()
    if not 0 < first.nbytes <= SMALL_BYTES or getattr(first, "is_nested", False):
        return 0
    if isinstance(first, np.ndarray):
        alike = {(value.dtype, value.shape) for value in values}
    elif first.layout is torch.strided and first.device.type == "cpu" and not first.is_quantized:
        alike = {(value.dtype, value.shape, value.layout, value.device, value.requires_grad) for value in values}
    return int(first.nbytes) if len(alike) == 1 else 0


def describe(obj: Any, digest: bytes) -> str:
    kind = type(obj)
    if kind is int and obj.bit_length() > LONGEST_INT_BITS:
        return f"int of {obj.bit_length()} bits {digest.hex()[:12]}"
    text = ""
    if issubclass(kind, pathlib.PurePath):
        text = f"{kind.__name__}({str(obj)!r})"  # what repr gives, unless a user's does anything else
    elif kind in ATOMS:
        text = repr(obj[:80] if kind is str else obj)  # it may be a whole book
    if text:
        return text if len(text) <= 80 else f"{text[:77]}..."
    if kind is types.ModuleType:
        return f"module {obj.__name__} ({package_of(obj.__name__) or digest.hex()[:12]})"
    named = obj if isinstance(obj, (type, types.FunctionType)) else kind
    text = f"{kind.__name__} " if named is obj else ""
    text += f"{named.__module__}.{named.__qualname__}".removeprefix("builtins.")
    if named is obj and (package := package_of(obj.__module__)):
        return f"{text} ({package})"
    if isinstance(obj, (torch.Tensor, np.ndarray)) and not getattr(obj, "is_nested", False):
        text += f" {obj.dtype} {list(obj.shape)}"
    elif kind in (list, tuple, dict, set, frozenset, bytes, bytearray):
        text += f" of {len(obj)}"
    return f"{text} {digest.hex()[:12]}"
