"""Identity of a dataset: the same key in every process for the same content and code, and another for any other.

The walk gives every object a digest of its own, made from its class's and its state's (a Merkle tree), so equal values
count the same whether they are shared or copied.

- *Data* counts by content. Dicts and sequences are ordered, sets are not; attributes count in the order of their names.
- *Instances* count by class and by what pickle would save: ``__getstate__`` and ``__reduce__`` are honoured. A method
  ``__fingerprint__()`` says what counts in place of the state.
- *The user's code* counts by bytecode, constants, defaults, closures and the globals that it names, followed into the
  user's own modules. Line numbers, file names, docstrings, comments and annotations do not count.
- *The code of Python and of installed packages* counts by name and version. A package edited in place under an
  unchanged version is not noticed, nor is what code reaches only through ``getattr`` or ``eval``.
- *Files* count by the paths that the dataset holds, relative ones as they are written; what is in them does not count.
- *Random generators* count by their seed, never by their state, which moves with use. One that was never seeded cannot
  be identified. ``random.Random`` and ``RandomState`` do not tell their seed and are left out: a source that draws
  from them is the randomness guard's business.
- *Left out*, and listed by ``explain=True``: locks, threads, loggers, weak references, the contents of ``lru_cache``
  and ``cached_property``, and what the class's own reading methods change (see ``bytecode.drift``).
"""

from __future__ import annotations

import collections
import collections.abc
import concurrent.futures
import copyreg
import dis
import enum
import functools
import hashlib
import importlib.machinery
import importlib.metadata
import importlib.util
import io
import itertools
import logging
import multiprocessing.process
import os
import pathlib
import random
import struct
import subprocess
import sys
import threading
import types
import weakref
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
import torch

from torchcache import bytecode
from torchcache.errors import FingerprintError
from torchcache.packages import find_spec, is_exported, package_of

__all__ = ["Fingerprint", "fingerprint"]

SCHEME = "torchcache fingerprint 1"  # part of every key: whatever changes what counts must change it
KEY_BYTES = 16
CHUNK_BYTES = 4 << 20  # large buffers are hashed in pieces, in threads: hashlib lets go of the GIL
SMALL_BYTES = 1 << 16  # a shorter buffer goes into its parent's hash as it is
BULK_ROWS = 256  # longer lists of equal rows are hashed column by column, shorter ones element by element
LISTED_ELEMENTS = 64  # elements of one container that `explain` lists
UNSEEDED_NUMPY_BITS = 96  # NumPy draws 128 bits of entropy when no seed is given
UNSEEDED_TORCH_BITS = 48  # torch.Generator.seed() draws 64 bits; the default seed has 46

_OMITTED = "left out"
_ATOMS: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    int: lambda value: format(value, "x").encode(),
    bool: lambda value: b"1" if value else b"0",
    float: struct.Struct("<d").pack,
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    type(None): lambda value: b"",
    type(Ellipsis): lambda value: b"",
    type(NotImplemented): lambda value: b"",
}
_WRAPPERS: dict[type, tuple[str, ...]] = {  # what counts of each
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(len)): ("__wrapped__",),
}
_LEFT_OUT: dict[str, tuple[type, ...]] = {
    "a lock": (
        type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event,
        threading.Barrier,
    ),
    "a thread": (threading.Thread, threading.local, concurrent.futures.ThreadPoolExecutor),
    "a logger": (logging.Logger, logging.Handler, logging.LoggerAdapter),
    "a weak reference": (
        weakref.ref, *weakref.ProxyTypes, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    ),
    "a generator that does not tell its seed": (random.Random, np.random.RandomState),
}  # fmt: skip
_NOT_CONTENT = frozenset(
    [
        "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__",
        "__slots__", "_abc_impl", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
        "__abstractmethods__", "__parameters__", "__orig_bases__", "__type_params__", "__dataclass_fields__",
        "__dataclass_params__", "__slotnames__",
    ]
)  # of a class: what follows from the rest, or has no influence on what the class does  # fmt: skip


@dataclass(frozen=True)
class Fingerprint:
    """A key and what went into it. Printed, two of them can be compared line by line.

    Attributes:
        key: what ``fingerprint(obj)`` returns.
        parts: by attribute path, the value or a digest of it, or why it was left out.
    """

    key: str
    parts: dict[str, str] = field(hash=False)

    def __str__(self) -> str:
        return "\n".join([f"key {self.key}", *(f"{path}  {what}" for path, what in self.parts.items())])


@overload
def fingerprint(obj: object, *, explain: Literal[False] = False) -> str: ...
@overload
def fingerprint(obj: object, *, explain: Literal[True]) -> Fingerprint: ...
def fingerprint(obj: object, *, explain: bool = False) -> str | Fingerprint:
    """Identify an object by its content and code.

    Args:
        obj: a dataset, a transform, or anything else; messages call it ``dataset``.
        explain: return a `Fingerprint`, which also lists what went in and what was left out.

    Returns:
        32 hexadecimal digits, the same in every process in which the content and the code are the same.

    Raises:
        FingerprintError: something in it cannot be identified (an open file, a socket, an iterator, a generator
            without a seed); the message names the attribute.

    Example:
        >>> fingerprint([1, 2]) == fingerprint([1, 2]), fingerprint([1, 2]) == fingerprint([2, 1])
        (True, False)
    """
    parts: dict[str, str] | None = {} if explain else None
    try:
        key = _hash(SCHEME, _Walk(parts).digest(obj, "dataset")).hex()
    except RecursionError as error:
        raise FingerprintError(
            "dataset is nested too deeply to be identified. Pass key= to name its content yourself."
        ) from error
    return key if parts is None else Fingerprint(key, parts)


class _Walk:
    """One walk over an object. Each method takes an object and the path by which a message would name it."""

    def __init__(self, parts: dict[str, str] | None, underway: dict[int, int] | None = None) -> None:
        self.parts = parts
        self.quiet = 0
        self.known: dict[int, tuple[object, bytes]] = {}  # by id; holds the object, or its id could be used again
        self.underway: dict[int, int] = dict(underway or {})  # id to depth, of the objects around this one
        self.sources: dict[str, bytes] = {}  # of whole modules, by name
        self.rules: dict[type, _Rule] = {}

    def digest(self, obj: Any, path: str) -> bytes:
        kind = type(obj)
        encode = _ATOMS.get(kind)
        if encode is not None:
            result = _hash(kind.__name__, encode(obj))
        elif id(obj) in self.known:
            result = self.known[id(obj)][1]
        elif id(obj) in self.underway:
            return _hash("cycle", _number(len(self.underway) - self.underway[id(obj)]))
        else:
            self.note(path, "")  # its line comes above those of what it holds
            self.underway[id(obj)] = len(self.underway)
            try:
                rule = self.rules.get(kind) or self.rules.setdefault(kind, _rule(kind))
                result = rule(self, obj, path)
            finally:
                del self.underway[id(obj)]
            if result != _hash(_OMITTED):  # its reason is listed wherever it is met
                self.known[id(obj)] = (obj, result)
        if self.parts is not None and (path in self.parts or not isinstance(obj, type)):  # a class is listed once
            self.note(path, _describe(obj, result))
        return result

    def note(self, path: str, what: str) -> None:
        if self.parts is not None and not self.quiet and not self.parts.get(path, "").startswith(_OMITTED):
            self.parts[path] = what

    def leave_out(self, path: str, why: str) -> bytes:
        self.note(path, f"{_OMITTED}: {why}")
        return _hash(_OMITTED)

    def alone(self) -> _Walk:
        """A walk from here that neither sees nor leaves behind what other branches have met."""
        return _Walk(None, self.underway)

    # Data

    def sequence(self, obj: Sequence[Any], path: str) -> bytes:
        return _hash(type(obj).__name__, _number(len(obj)), self.column(obj, path))

    def mapping(self, obj: Any, path: str) -> bytes:
        keys, values = list(obj), list(obj.values())
        self.quiet += 1
        tag = _hash(type(obj).__name__, _number(len(keys)), self.column(keys, f"{path}.keys()"))
        self.quiet -= 1
        if len(keys) >= BULK_ROWS:
            return _hash("dict", tag, self.column(values, f"{path}.values()"))
        names = [repr(key) if type(key) in _ATOMS else "..." for key in keys]
        pairs = zip(names, values, strict=True)
        return _hash("dict", tag, *[self.digest(value, f"{path}[{name}]") for name, value in pairs])

    def column(self, values: Sequence[Any], path: str) -> bytes:
        """Digest of many values, in bulk where all are of one plain type: some 20 times as fast as one by one."""
        kinds = set(map(type, values))
        kind = kinds.pop() if len(kinds) == 1 else type(None)
        if kind is str:
            text = "".join(values).encode("utf-8", "surrogatepass")
            return _hash("strings", _condense(array("q", map(len, values))), _condense(text))
        if kind is int or kind is float:
            try:
                return _hash(f"{kind.__name__}s", _condense(array("q" if kind is int else "d", values)))
            except OverflowError:
                pass  # integers beyond 64 bits go one by one
        if len(values) < BULK_ROWS:
            return self.elements(values, path)
        if kind is tuple and len(set(map(len, values))) == 1:
            columns = [self.column([row[i] for row in values], f"{path}[:][{i}]") for i in range(len(values[0]))]
            return _hash("rows", *columns)
        if kind is dict and len(set(map(tuple, values))) == 1:
            columns = [self.column([row[key] for row in values], f"{path}[:][{key!r}]") for key in values[0]]
            return _hash("records", self.column(list(values[0]), path), *columns)
        if kind is list and set(map(type, itertools.chain.from_iterable(values))) <= _ATOMS.keys():
            flat = list(itertools.chain.from_iterable(values))
            return _hash("ragged", _condense(array("q", map(len, values))), self.column(flat, path))
        if kind in (np.ndarray, torch.Tensor) and (width := _uniform_bytes(values)):
            stack: Callable[[Any], Any] = np.stack if kind is np.ndarray else torch.stack
            rows = max(1, CHUNK_BYTES // width)
            chunks = (stack(values[start : start + rows]) for start in range(0, len(values), rows))
            return _hash("stack", *[_rule(kind)(self, chunk, path) for chunk in chunks])
        if issubclass(kind, pathlib.PurePath):
            return _hash("paths", self.digest(kind, path), self.column(list(map(str, values)), path))
        return self.elements(values, path)

    def elements(self, values: Sequence[Any], path: str) -> bytes:
        digests = [self.digest(value, f"{path}[{i}]") for i, value in enumerate(values[:LISTED_ELEMENTS])]
        self.quiet += 1
        digests += [self.digest(values[i], f"{path}[{i}]") for i in range(LISTED_ELEMENTS, len(values))]
        self.quiet -= 1
        return _hash("elements", *digests)

    def unordered(self, obj: Any, path: str) -> bytes:
        kind = type(obj)
        # Each element alone: the order of a set differs between processes, and so would what a shared walk knows.
        walks = (self if type(element) in _ATOMS else self.alone() for element in obj)
        members = sorted(walk.digest(element, f"{path}{{...}}") for walk, element in zip(walks, obj, strict=True))
        own = b"" if kind in (set, frozenset) else self.subclass(obj, path)
        return _hash("set" if issubclass(kind, set) else "frozenset", own, *members)

    def subclass(self, obj: Any, path: str) -> bytes:
        """What an instance of a subclass adds to the built-in type that it is."""
        return self.digest(type(obj), f"{path}.__class__") + self.state(obj, getattr(obj, "__dict__", {}), path)

    def buffer(self, obj: Any, path: str) -> bytes:
        return _hash(type(obj).__name__, _condense(obj.tobytes() if isinstance(obj, memoryview) else obj))

    def stream(self, obj: Any, path: str) -> bytes:
        return _hash(type(obj).__name__, self.digest(obj.getvalue(), path))  # not the position, which reading moves

    def array(self, obj: Any, path: str) -> bytes:
        kind, plain = type(obj), np.asarray(obj)
        if isinstance(obj, np.ma.MaskedArray):
            mask, fill = np.ma.getmaskarray(obj), np.asarray(obj.fill_value)
            own = self.digest(kind, f"{path}.__class__") + self.array(mask, path) + self.array(fill, path)
        else:
            own = b"" if kind in (np.ndarray, np.memmap) else self.subclass(obj, path)
        if plain.dtype.names:  # field by field: the padding between fields is arbitrary
            content = b"".join(self.array(plain[name], path) for name in plain.dtype.names)
        elif plain.dtype.hasobject:
            content = self.column(plain.ravel().tolist(), path)
        else:
            content = _condense(np.ascontiguousarray(plain).reshape(-1).view(np.uint8)) if plain.nbytes else b""
        return _hash("array", own, repr(plain.dtype).encode(), repr(plain.shape).encode(), content)

    def tensor(self, obj: torch.Tensor, path: str) -> bytes:
        kind = type(obj)
        if obj.is_nested:  # the attributes of the jagged ones are caches
            own = self.digest(kind, f"{path}.__class__")
        else:
            own = b"" if kind is torch.Tensor else self.subclass(obj, path)
        shape = "nested" if obj.is_nested else list(obj.shape)
        form = f"{obj.dtype} {shape} {obj.layout} {obj.device.type} {obj.requires_grad}"
        try:
            with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                parts = [_condense(part) for part in _tensor_buffers(obj)]
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise _refusal(obj, path, f"its bytes cannot be read ({error})") from error
        return _hash("tensor", own, form.encode(), *parts)

    def image(self, obj: Any, path: str) -> bytes:
        content = obj.tobytes()  # reads a file that was opened lazily, which may change mode and info
        info = self.digest(obj.info, f"{path}.info")
        return _hash("image", f"{obj.mode} {obj.size} {obj.getpalette()}".encode(), info, _condense(content))

    def member(self, obj: enum.Enum, path: str) -> bytes:
        return _hash("enum", self.digest(type(obj), f"{path}.__class__"), self.digest(obj.value, f"{path}.value"))

    def path(self, obj: pathlib.PurePath, path: str) -> bytes:
        return _hash("path", self.digest(type(obj), f"{path}.__class__"), str(obj).encode("utf-8", "surrogatepass"))

    def by_repr(self, obj: Any, path: str) -> bytes:
        return _hash(type(obj).__name__, repr(obj).encode())

    # Random generators

    def numpy_generator(self, obj: Any, path: str) -> bytes:
        bits = getattr(obj, "bit_generator", obj)
        seed = bits if isinstance(bits, np.random.SeedSequence) else getattr(bits, "seed_seq", None)
        if not isinstance(seed, np.random.SeedSequence) or seed.entropy is None:
            raise _refusal(obj, path, "its seed is not known")
        if isinstance(seed.entropy, int) and seed.entropy.bit_length() > UNSEEDED_NUMPY_BITS:
            raise _refusal(obj, path, "it was made without a seed, so it is another one in each process")
        entropy = np.atleast_1d(np.asarray(seed.entropy, dtype=object)).tolist()
        seeds = [list(map(int, entropy)), list(map(int, seed.spawn_key)), seed.pool_size]
        return _hash(f"{type(obj).__name__} {type(bits).__name__}", self.alone().digest(seeds, path))

    def torch_generator(self, obj: torch.Generator, path: str) -> bytes:
        seed = obj.initial_seed()
        if seed.bit_length() > UNSEEDED_TORCH_BITS:
            raise _refusal(obj, path, "its seed was drawn at random, so it is another one in each process")
        return _hash("torch.Generator", f"{obj.device.type} {seed}".encode())

    # Objects and classes

    def instance(self, obj: Any, path: str) -> bytes:
        kind = type(obj)
        if callable(obj) and (package := package_of(kind.__module__)) and is_exported(obj):
            return _hash("name", obj.__module__.encode(), obj.__qualname__.encode(), package.encode())
        try:
            reduce = copyreg.dispatch_table.get(kind)
            reduced = reduce(obj) if reduce else obj.__reduce_ex__(4)
        except Exception as error:  # a class's own code, which may raise anything to say that it cannot be pickled
            raise _refusal(obj, path, f"its content cannot be identified ({error})") from error
        if isinstance(reduced, str):
            return _hash("name", f"{kind.__module__} {getattr(obj, '__module__', '')} {reduced}".encode())
        make, args, state, items, pairs = (*reduced, None, None, None)[:5]
        if make is getattr(copyreg, "__newobj__", None):
            make, args = args[0], args[1:]
        own = self.digest(make, f"{path}.__class__" if make is kind else f"{path}.__reduce__()[0]")
        own += self.digest(args, path) if args else b""
        content = [self.column(list(items), path)] if items is not None else []
        content += [self.digest(dict(pairs), path)] if pairs is not None else []
        return _hash("instance", own, self.state(obj, state, path), *content)

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
        return _hash("state", *parts)

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

    def chosen(self, obj: Any, path: str) -> bytes:
        """An object that says itself what counts."""
        content = self.digest(obj.__fingerprint__(), f"{path}.__fingerprint__()")
        return _hash("chosen", self.digest(type(obj), f"{path}.__class__"), content)

    def wrapper(self, obj: Any, path: str) -> bytes:
        kind = next(kind for kind in type(obj).__mro__ if kind in _WRAPPERS)
        own = self.digest(type(obj), f"{path}.__class__") if kind is not type(obj) else b""
        parts = [self.digest(getattr(obj, name), f"{path}.{name}") for name in _WRAPPERS[kind]]
        return _hash(kind.__name__, own, *parts)

    def builtin(self, obj: Any, path: str) -> bytes:
        owner = obj.__self__
        if owner is None or isinstance(owner, types.ModuleType):
            return _hash("builtin", f"{obj.__module__}.{obj.__qualname__}".encode())
        return _hash("builtin", obj.__name__.encode(), self.digest(owner, f"{path}.__self__"))

    def descriptor(self, obj: Any, path: str) -> bytes:
        return _hash("descriptor", f"{obj.__objclass__.__qualname__}.{obj.__name__}".encode())

    def class_(self, cls: Any, path: str) -> bytes:
        name = f"{cls.__module__}.{cls.__qualname__}".replace("__mp_main__", "__main__")  # as spawned workers call it
        package = package_of(cls.__module__)
        if package and (is_exported(cls) or not cls.__flags__ & _HEAP_TYPE):
            return _hash("class", name.encode(), package.encode())
        drift = bytecode.drift(cls)
        parts = [name.encode()]
        for key, value in sorted(_class_content(cls).items()):
            if drift.get(key) == bytecode.COUNTER:
                self.leave_out(f"{path}.{key}", bytecode.COUNTER)
            else:
                parts += [key.encode(), self.digest(value, f"{path}.{key}")]
        bases = [base for base in (*cls.__bases__, type(cls)) if base not in (object, type)]
        return _hash("class", *parts, *(self.digest(base, f"{path}.{base.__name__}") for base in bases))

    # Code

    def function(self, obj: types.FunctionType, path: str) -> bytes:
        package = package_of(obj.__module__)
        if package and is_exported(obj):
            return _hash("function", f"{obj.__module__}.{obj.__qualname__}".encode(), package.encode())
        code, home = obj.__code__, obj.__globals__.get("__name__")
        package = package_of(home)  # of what was defined there: a decorator's wrapper bears the name of what it wraps
        if package:
            parts = [f"{home}.{getattr(code, 'co_qualname', code.co_name)}".encode(), package.encode()]
        else:
            parts = [self.code(code, path), self.references(obj, path)]
        extras = {key: value for key, value in vars(obj).items() if key != "__wrapped__"}
        for name, content in (("__defaults__", obj.__defaults__), ("__kwdefaults__", obj.__kwdefaults__)):
            parts.append(self.digest(content, f"{path}.{name}") if content else b"")
        parts.append(self.state(obj, extras, path))
        for name, cell in zip(code.co_freevars, obj.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # a name that is bound later
                value = NotImplemented
            parts.append(self.digest(value, f"{path}.__closure__[{name!r}]"))
        return _hash("function", *parts)

    def code(self, code: types.CodeType, path: str) -> bytes:
        named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        lines = [f"{code.co_argcount} {code.co_posonlyargcount} {code.co_flags & _FLAGS} {named} {code.co_freevars}"]
        steps = bytecode.instructions(code)
        for step, then in itertools.zip_longest(steps, steps[1:]):
            what = f"{step.arg} {step.argrepr}"
            if step.opcode in dis.hasconst:
                unused = then is not None and then.opname == "STORE_NAME" and then.argval in _NOT_CONTENT
                what = "" if unused else self.constant(step.argval, path).hex()
            lines.append(f"{step.opname} {what}")
        return _hash("code", "\n".join(lines).encode("utf-8", "surrogatepass"), getattr(code, "co_exceptiontable", b""))

    def constant(self, value: Any, path: str) -> bytes:
        return self.code(value, path) if isinstance(value, types.CodeType) else self.alone().digest(value, path)

    def references(self, function: types.FunctionType, path: str) -> bytes:
        """What a function's code names outside of itself: globals, attributes of the user's modules, late imports."""
        space = function.__globals__
        names, imports, assigned = bytecode.mentions(function.__code__)
        parts = []
        for name in sorted(names.keys() & space.keys() - {"__name__"}):  # which is another in spawned workers
            value, where = space[name], f"{path}.__globals__[{name!r}]"
            if isinstance(value, types.ModuleType):
                parts += [self.attribute(value, chain, where) for chain in sorted(names[name])]
            else:
                content = self.unless_drifting(value, where, assigned.get(name))
                parts += [name.encode(), content] if content is not None else []
        parts += [self.imported(target, space.get("__package__"), path) for target in imports]
        return _hash("references", *parts)

    def attribute(self, value: Any, chain: tuple[str, ...], path: str) -> bytes:
        """``module.a.b`` as far as it leads through the user's modules: only what is used of them counts."""
        names = iter(chain)
        while isinstance(value, types.ModuleType) and not package_of(value.__name__):
            name = next(names, None)
            if name is None or name not in vars(value):
                break
            value, path = vars(value)[name], f"{path}.{name}"
        return _hash(".".join(chain), self.digest(value, path))

    def module(self, obj: types.ModuleType, path: str) -> bytes:
        package = package_of(obj.__name__)
        if package:
            return _hash("module", obj.__name__.encode(), package.encode())
        if obj.__spec__ is None:  # made by hand, or the main script
            return self.digest({key: value for key, value in vars(obj).items() if not key.startswith("__")}, path)
        return self.source(obj.__spec__, path)

    def source(self, spec: Any, path: str) -> bytes:
        """The code of a whole module of the user's, imported or not, and of those that it imports."""
        if spec.name not in self.sources:
            self.sources[spec.name] = b"underway"
            code = spec.loader.get_code(spec.name) if hasattr(spec.loader, "get_code") else None
            if code is not None:
                imports = (self.imported(target, spec.parent, path) for target in bytecode.mentions(code)[1])
                self.sources[spec.name] = _hash("source", self.code(code, path), *imports)
            elif spec.origin and os.path.isfile(spec.origin):  # compiled
                self.sources[spec.name] = _hash("binary", _condense(pathlib.Path(spec.origin).read_bytes()))
        return self.sources[spec.name]

    def imported(self, target: tuple[int, str, tuple[str, ...]], parent: str | None, path: str) -> bytes:
        level, name, attributes = target
        parts = []
        for late in (name, *(f"{name}.{attribute}" if name else attribute for attribute in attributes)):
            full = importlib.util.resolve_name("." * level + late, parent) if level and parent else late
            spec = find_spec(full)
            if spec is not None:  # otherwise not installed, or not a module but something in one
                package = package_of(full)
                parts.append(_hash("import", full.encode(), package.encode() if package else self.source(spec, path)))
        return _hash("imports", *parts)


_Rule = Callable[[_Walk, Any, str], bytes]
_RULES: tuple[tuple[tuple[type, ...], _Rule], ...] = (
    ((io.BytesIO, io.StringIO), _Walk.stream),
    ((type,), _Walk.class_),
    ((types.FunctionType,), _Walk.function),
    (tuple(_WRAPPERS), _Walk.wrapper),
    ((types.BuiltinFunctionType, types.MethodWrapperType), _Walk.builtin),
    (
        (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
         types.MethodDescriptorType, types.ClassMethodDescriptorType),
        _Walk.descriptor,
    ),
    ((types.ModuleType,), _Walk.module),
    ((types.CodeType,), _Walk.code),
    ((torch.Tensor,), _Walk.tensor),
    ((np.ndarray, np.generic), _Walk.array),
    ((np.random.Generator, np.random.BitGenerator, np.random.SeedSequence), _Walk.numpy_generator),
    ((torch.Generator,), _Walk.torch_generator),
    ((set, frozenset), _Walk.unordered),
    ((types.MappingProxyType,), _Walk.mapping),
    ((bytes, bytearray, memoryview), _Walk.buffer),
    ((enum.Enum,), _Walk.member),
    ((np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo), _Walk.by_repr),
)  # fmt: skip
_EXACT: dict[type, _Rule] = {
    tuple: _Walk.sequence,
    list: _Walk.sequence,
    dict: _Walk.mapping,
    collections.OrderedDict: _Walk.mapping,
    pathlib.PurePosixPath: _Walk.path,
    pathlib.PureWindowsPath: _Walk.path,
    pathlib.PosixPath: _Walk.path,
    pathlib.WindowsPath: _Walk.path,
}  # a subclass of these has state of its own
_HANDLES = (io.IOBase, subprocess.Popen, multiprocessing.process.BaseProcess, torch.Stream, torch.Event)

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes made at run time, clear for those built into a library
_FLAGS = 0x3FF  # of code objects: those that change what the code does


def _rule(kind: type) -> _Rule:
    if callable(getattr(kind, "__fingerprint__", None)):
        return _Walk.chosen
    for why, kinds in _LEFT_OUT.items():
        if issubclass(kind, kinds):
            return lambda walk, obj, path: walk.leave_out(path, why)
    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize and issubclass(kind, (synchronize.SemLock, synchronize.Condition, synchronize.Event)):
        return lambda walk, obj, path: walk.leave_out(path, "a lock")
    image = sys.modules.get("PIL.Image")
    if image and issubclass(kind, image.Image):
        return _Walk.image
    rule = _EXACT.get(kind) or next((rule for kinds, rule in _RULES if issubclass(kind, kinds)), None)
    if rule is None and issubclass(kind, _HANDLES):
        return _refuse
    if rule is None and issubclass(kind, collections.abc.Iterator):
        # Reading moves a built-in iterator; one that is a class of the user's counts by its state.
        return _Walk.instance if isinstance(kind.__next__, types.FunctionType) else _refuse
    return rule or _Walk.instance


def _refuse(walk: _Walk, obj: Any, path: str) -> bytes:
    raise _refusal(obj, path, "its content is outside of the process, or changes as it is read")


def _refusal(obj: Any, path: str, why: str) -> FingerprintError:
    kind = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    return FingerprintError(
        f"{path} ({kind}) cannot be identified: {why}. Pass key= to name the dataset's content yourself, or give the "
        "class that holds it a __getstate__ or __fingerprint__ method that leaves it out."
    )


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def _hash(tag: str, *contents: bytes) -> bytes:
    hasher = hashlib.blake2b(tag.encode(), digest_size=KEY_BYTES)
    for content in contents:
        hasher.update(b"%d:" % len(content))
        hasher.update(content)
    return hasher.digest()


def _condense(buffer: Any) -> bytes:
    """A short stand-in for a buffer. SHA-256, for which processors have instructions: blake2b takes 3 times as long."""
    view = memoryview(buffer)
    if view.nbytes <= SMALL_BYTES:
        return view.tobytes()
    view = view.cast("B")
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    if len(chunks) == 1:
        return b"1" + hashlib.sha256(view).digest()
    with concurrent.futures.ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1, 8)) as pool:
        leaves = pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)
        return _number(len(view)) + hashlib.sha256(b"".join(leaves)).digest()


def _tensor_buffers(tensor: torch.Tensor) -> list[Any]:
    if tensor.is_nested:
        parts = list(tensor.unbind())
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.is_quantized:
        parts = [tensor.int_repr(), tensor.dequantize()]
    elif tensor.device.type == "meta":
        return []
    else:
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return [plain.reshape(-1).view(torch.uint8).numpy()]
    return [buffer for part in parts for buffer in (repr(list(part.shape)).encode(), *_tensor_buffers(part))]


def _uniform_bytes(values: Sequence[Any]) -> int:
    """Bytes of each of many small arrays or tensors that can be stacked; 0 if they cannot."""
    first, alike = values[0], set[Any]()
    if not 0 < first.nbytes <= SMALL_BYTES or getattr(first, "is_nested", False):
        return 0
    if isinstance(first, np.ndarray):
        alike = {(value.dtype, value.shape) for value in values}
    elif first.layout is torch.strided and first.device.type == "cpu" and not first.is_quantized:
        alike = {(value.dtype, value.shape, value.layout, value.device, value.requires_grad) for value in values}
    return int(first.nbytes) if len(alike) == 1 else 0


def _describe(obj: Any, digest: bytes) -> str:
    kind = type(obj)
    if kind in _ATOMS or issubclass(kind, pathlib.PurePath):
        text = repr(obj)
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


def _class_content(cls: Any) -> dict[str, Any]:
    """The attributes of a class that count."""
    content = {key: value for key, value in vars(cls).items() if key not in _NOT_CONTENT}
    if not issubclass(cls, enum.Enum):
        return content
    # An Enum keeps its members in several private tables.
    own = {key: value for key, value in content.items() if not (key.startswith("_") and key.endswith("_"))}
    methods = {key: value for key, value in content.items() if isinstance(value, types.FunctionType)}
    return own | methods | {key: member.value for key, member in cls.__members__.items()}
