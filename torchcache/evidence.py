"""What a dataset or transform holds, and which of it draws random numbers: found by looking, nothing is run."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import re
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

MAX_DEPTH, MAX_OBJECTS, MAX_ELEMENTS = 8, 2000, 64  # of the search; bounds its time

GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
_LEAVES: tuple[type, ...] = (
    str, bytes, bytearray, int, float, complex, type(None), type, torch.Tensor, np.ndarray, np.generic,
    *weakref.ProxyTypes,
)  # fmt: skip
_LIBRARIES = ("torch", "torchvision", "numpy", "builtins", "abc", "typing", "collections", "functools", "enum")
_RANDOM_CLASS = re.compile(
    r"Rand(om|[A-Z])|AutoAugment|TrivialAugment|AugMix|CutMix|MixUp|ColorJitter|ScaleJitter|ElasticTransform"
    r"|Gaussian(Noise|Blur)|\w*Dropout(\d|$)|RReLU"
)
_DRAWING_NAMES = frozenset(
    [
        "RandomState", "bernoulli", "bernoulli_", "betavariate", "binomial", "choice", "choices", "default_rng",
        "dirichlet", "dropout", "expovariate", "exponential", "exponential_", "gauss", "getrandbits", "integers",
        "lognormal", "multinomial", "normal", "normal_", "normalvariate", "permutation", "permuted", "poisson", "rand",
        "rand_like", "randbytes", "randint", "randint_like", "randn", "randn_like", "random", "random_",
        "random_sample", "randperm", "randrange", "sample", "shuffle", "standard_normal", "triangular", "uniform",
        "uniform_", "urandom", "uuid4",
    ]
)  # fmt: skip


def reachable(root: Any, path: str) -> Iterator[tuple[str, Any]]:
    """An object and what it holds, nearest first, each with its path; without leaves such as strings and tensors."""
    seen = {id(root)}
    level = [(path, root)]
    for _ in range(MAX_DEPTH):
        below: list[tuple[str, Any]] = []
        for where, obj in level:
            yield where, obj
            for step, child in _held(obj):
                if id(child) not in seen and not issubclass(type(child), _LEAVES) and len(seen) < MAX_OBJECTS:
                    seen.add(id(child))
                    below.append((where + step if step[0] in ".[" else step, child))
        level = below


def _held(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", value) for i, value in enumerate(_first(obj)))
    elif isinstance(obj, dict):
        named = ((repr(key) if isinstance(key, (str, int)) else "...", value) for key, value in _first(obj.items()))
        yield from ((f"[{key}]", value) for key, value in named)
    elif isinstance(obj, functools.partial):
        yield from ((".func", obj.func), (".args", obj.args), (".keywords", obj.keywords))
    elif isinstance(obj, types.MethodType):
        yield from ((".__self__", obj.__self__), (".__func__", obj.__func__))
    elif isinstance(obj, types.BuiltinFunctionType):
        yield ".__self__", obj.__self__
    elif isinstance(obj, types.FunctionType):
        yield from _named_by(obj)
    elif isinstance(obj, (types.ModuleType, *GENERATORS)):
        return
    attributes = getattr(obj, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", value) for name, value in list(attributes.items()))
    kind: Any = type(obj)
    for name in _slots(kind):
        value = getattr(obj, name, None)
        if value is not None:
            yield f".{name}", value
    for function in _methods(kind):
        yield from _named_by(function)


def _first(values: Any) -> list[Any]:
    with contextlib.suppress(RuntimeError):  # another thread changes it
        return list(itertools.islice(values, MAX_ELEMENTS))
    return []


@functools.lru_cache(maxsize=256)
def _slots(cls: Any) -> list[str]:
    return [name for name, value in _members(cls) if isinstance(value, types.MemberDescriptorType)]


@functools.lru_cache(maxsize=256)
def _methods(cls: Any) -> list[types.FunctionType]:
    values = [value for _, value in _members(cls)]
    functions = [getattr(value, "__wrapped__", None) or getattr(value, "fget", None) or value for value in values]
    return [function for function in functions if isinstance(function, types.FunctionType)]


def _members(cls: Any) -> list[tuple[str, Any]]:
    bases = [base for base in cls.__mro__ if str(base.__module__).partition(".")[0] not in _LIBRARIES]
    return [item for base in bases for item in vars(base).items()]


def _named_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function holds: its closure, its defaults, and the generators and functions among the globals it names."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a name that is bound later
            yield f"{name} in {function.__qualname__}", cell.cell_contents
    for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
        yield f"a default of {function.__qualname__}", value
    names = _names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        for inner, found in [(name, value)] + [
            (f"{name}.{attribute}", vars(value).get(attribute))
            for attribute in (names if isinstance(value, types.ModuleType) and not _is_library(value.__name__) else ())
        ]:
            is_helper = isinstance(found, types.FunctionType) and not _is_library(found.__module__)
            if is_helper or isinstance(found, GENERATORS):
                yield f"{found.__module__}.{name}" if is_helper else f"the global {inner}", found


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


def signs(root: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each object that one holds, with what tells that it is random ("" if nothing does)."""
    for where, obj in reachable(root, path):
        if isinstance(obj, GENERATORS):
            yield where, "a generator"
            continue
        kind: Any = type(obj)
        functions = [obj] if kind is types.FunctionType else _methods(kind)
        drawing = sorted({name for function in functions for name in _names(function.__code__) & _DRAWING_NAMES})
        if kind is types.BuiltinFunctionType and obj.__name__ in _DRAWING_NAMES:
            drawing = [obj.__name__]
        place = f"{where} ({obj.__qualname__ if kind is types.FunctionType else kind.__name__})"
        if _is_random_step(obj):
            yield place, "a random step"
        else:
            yield f"{place}, which names {' and '.join(drawing)}", " ".join(drawing)


def _is_random_step(obj: Any) -> bool:
    kind = type(obj)
    if isinstance(obj, torch.nn.Module) and not obj.training and kind.__module__.startswith("torch.nn."):
        return False  # dropout, which evaluation turns off
    if _RANDOM_CLASS.match(kind.__name__) and callable(obj):
        return True
    transforms = sys.modules.get("torchvision.transforms.v2")
    if transforms and isinstance(obj, transforms.Transform):
        makers = ("make_params", "_get_params")  # its name in torchvision 0.20 and before
        return any(getattr(kind, name, None) is not getattr(transforms.Transform, name, None) for name in makers)
    return kind.__module__.startswith("torchvision.") and hasattr(kind, "get_params")
