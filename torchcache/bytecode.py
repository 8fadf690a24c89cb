"""What code does to names and attributes: which globals it reads, what it imports, what reading a sample changes."""

from __future__ import annotations

import dis
import functools
import itertools
import types
from collections.abc import Iterator
from typing import Any

from torchcache.packages import package_of

COUNTER = "a counter that reading advances"
FILLED = "a cache that reading fills"
OPENED = "made by reading"
CACHED = "a cached property"
_SKIPPED_STEPS = frozenset({"CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL"})
# The methods by which a sample is read.
_READING = ("__getitem__", "__getitems__", "__iter__", "__next__", "__call__", "__len__", "forward", "transform")


@functools.lru_cache(maxsize=1024)
def instructions(code: types.CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _SKIPPED_STEPS]


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


_Names = dict[str, set[tuple[str, ...]]]
_Import = tuple[int, str, tuple[str, ...]]


def mentions(code: types.CodeType) -> tuple[_Names, list[_Import], dict[str, str]]:
    """Globals read, with the attribute chains read of them; modules imported; globals assigned, and how."""
    names: _Names = {}
    imports: list[_Import] = []
    assigned: dict[str, str] = {}
    for part in _nested(code):
        steps = instructions(part)
        for i, step in enumerate(steps):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                chain = itertools.takewhile(lambda then: then.opname in ("LOAD_ATTR", "LOAD_METHOD"), steps[i + 1 :])
                names.setdefault(step.argval, set()).add(tuple(then.argval for then in chain))
            elif step.opname == "IMPORT_NAME":
                imports.append((int(steps[i - 2].argval or 0), step.argval, tuple(steps[i - 1].argval or ())))
            elif step.opname == "STORE_GLOBAL":
                counts = i > 2 and _adds_number(steps[i - 2 : i]) and steps[i - 3].argval == step.argval
                assigned[step.argval] = COUNTER if counts and assigned.get(step.argval) != OPENED else OPENED
    return names, imports, assigned


def _adds_number(steps: list[dis.Instruction]) -> bool:
    number, operation = steps
    return isinstance(number.argval, (int, float)) and operation.opname in ("BINARY_OP", "INPLACE_ADD")


@functools.lru_cache(maxsize=256)
def drift(cls: Any) -> dict[str, str]:
    """Attributes that reading a sample changes, found in the bytecode of the class's reading methods.

    Those are ``__getitem__``, ``__call__`` and the like, and what they call on ``self``. Three kinds are left out:
    - a counter, advanced there as in ``self.n += 1``, and elsewhere only set as in ``self.n = 0`` by ``__init__``: were
      samples to depend on it, they could not be cached;
    - a cache, filled there as in ``self.cache[i] = x``, and elsewhere only made as in ``self.cache = {}`` by
      ``__init__``;
    - anything else assigned there, while it is None or cannot be identified: a file that reading opens.
    The contents of a ``cached_property`` are left out too.
    """
    if any(getattr(cls, name, None) is not getattr(object, name, None) for name in ("__reduce__", "__getstate__")):
        return {}  # the class says itself what its state is
    methods: dict[str, list[types.CodeType]] = {}
    for base in cls.__mro__:
        for name, value in vars(base).items() if package_of(base.__module__) is None else ():
            function = getattr(value, "__wrapped__", None) or getattr(value, "fget", None) or value
            if isinstance(function, types.FunctionType):
                methods.setdefault(name, []).append(function.__code__)
    used: set[str] = set()
    fresh = methods.keys() & set(_READING)
    while fresh:
        used |= fresh
        parts = (part for method in fresh for code in methods[method] for part in _nested(code))
        fresh = {name for part in parts for name in part.co_names if name in methods} - used
    found = {
        name: CACHED
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, functools.cached_property)
    }
    for name, reason in (change for method in sorted(used) for code in methods[method] for change in _changes(code)):
        found[name] = reason if found.get(name, reason) == reason else OPENED
    others = [code for name, codes in methods.items() if name not in used for code in codes]
    return {name: reason for name, reason in found.items() if _starts_fresh(name, reason, others)}


def _changes(code: types.CodeType) -> Iterator[tuple[str, str]]:
    steps = instructions(code)
    for i, step in enumerate(steps):
        before = steps[max(i - 6, 0) : i]
        if step.opname == "STORE_ATTR":
            if before and _is_self(before[-1], code):
                yield step.argval, OPENED
            elif len(before) == 6 and _is_self(before[0], code) and before[2].argval == step.argval:
                yield step.argval, COUNTER if _adds_number(before[3:5]) else OPENED
        elif step.opname == "STORE_SUBSCR" and len(before) > 2 and _is_self(before[-3], code):
            attribute, key = before[-2:]
            if attribute.opname == "LOAD_ATTR" and key.opname.startswith("LOAD_FAST"):
                yield attribute.argval, FILLED


def _is_self(step: dis.Instruction, code: types.CodeType) -> bool:
    loaded = step.argval[-1] if isinstance(step.argval, tuple) and step.argval else step.argval
    return step.opname.startswith("LOAD_FAST") and code.co_argcount > 0 and loaded == code.co_varnames[0]


def _starts_fresh(name: str, reason: str, others: list[types.CodeType]) -> bool:
    """Whether the methods that do not read do no more with a counter or cache than make it, from a constant."""
    for code in others if reason in (COUNTER, FILLED) else ():
        steps = instructions(code)
        for i, step in enumerate(steps):
            if step.argval == name and not (reason == COUNTER and step.opname.startswith("LOAD_")):
                made = steps[max(i - 2, 0)]
                empty = made.opname == "BUILD_MAP" and made.arg == 0
                constant = isinstance(made.argval, int) and made.opname in ("LOAD_CONST", "LOAD_SMALL_INT")
                if code.co_name != "__init__" or not (constant if reason == COUNTER else empty):
                    return False
    return True
