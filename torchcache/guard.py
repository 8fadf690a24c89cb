"""Random numbers in what is to be cached: noticing them, and cutting them off.

A cache keeps the first result for good, so a random augmentation in the source would be the same in every epoch.
`RandomnessGuard` compares the states of the random generators before and after samples are produced; it reads states
and never draws. `split_transform` cuts a pipeline at its first random step, so that the rest can run after the cache.

What draws without a generator that the guard knows (``os.urandom``, the time, a CUDA generator, a generator that lives
only inside of a call) is not noticed.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import random
import re
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from torchcache.errors import RandomSampleError, RandomSampleWarning

__all__ = ["RandomnessGuard", "split_transform"]

FIRST_SAMPLES = 16  # of each process: nearly every random pipeline draws for each sample
EVERY_SAMPLES = 1000  # afterwards; a check takes some 0.3 ms
MAX_DEPTH, MAX_OBJECTS, MAX_ELEMENTS = 8, 2000, 64  # of the search for generators in a dataset; bounds its time
QUIET_S = 0.01, 0.1  # least and most to wait in order to see whether another thread draws

_GENERATORS = (random.Random, np.random.RandomState, np.random.Generator, torch.Generator)
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

_GLOBAL: dict[str, Callable[[], Any]] = {
    "Python's random module": lambda: random._inst,
    "NumPy's global generator": lambda: np.random.mtrand._rand,
    "torch's default generator": lambda: torch.default_generator,
}
_NOTHING = contextlib.nullcontext()
_guards: weakref.WeakSet[RandomnessGuard] = weakref.WeakSet()


def _start_anew() -> None:
    for guard in list(_guards):
        guard._start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)  # cheaper than asking for the process each time


class RandomnessGuard:
    """Notices that producing samples draws random numbers.

    It watches ``random``, NumPy's legacy generator, torch's default generator, and every generator that the dataset,
    its transforms or the globals that their code names hold. It looks at the first 16 samples that a process produces,
    and at about one in 1,000 afterwards. Pickling keeps settings only, and a forked process starts counting anew.

    Args:
        policy: ``"error"`` raises `RandomSampleError`; ``"warn"`` gives one `RandomSampleWarning`; ``"allow"`` does
            not look.

    Example:
        >>> guard = RandomnessGuard("error")
        >>> with guard.watch([1, 2, 3]):
        ...     sample = 1
    """

    def __init__(self, policy: Literal["error", "warn", "allow"] = "error") -> None:
        if policy not in ("error", "warn", "allow"):
            raise ValueError(f'on_random is "error", "warn" or "allow", not {policy!r}')
        self.policy = policy
        self._warned = False
        self._start()

    def _start(self) -> None:
        self._first = FIRST_SAMPLES
        self._left = 0  # samples to produce before the next look
        self._suspicious = False
        _guards.add(self)

    def __getstate__(self) -> dict[str, str]:
        return {"policy": self.policy}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["policy"])  # type: ignore[misc]

    def due(self, count: int = 1) -> bool:
        """Whether to watch the next ``count`` samples; counts them as produced."""
        self._left = left = self._left - count
        return left < 0 and self._decide(count)

    def _decide(self, count: int) -> bool:
        if self.policy == "allow" or self._warned:
            self._left = sys.maxsize
            return False
        self._first -= count
        self._left = 0 if self._first > 0 else EVERY_SAMPLES
        return True

    def watch(self, dataset: Any, count: int = 1) -> contextlib.AbstractContextManager[None]:
        """A context in which to produce ``count`` samples of a dataset, looked at if they are due.

        Raises:
            RandomSampleError: on leaving, if random numbers were drawn and the policy is ``"error"``.
        """
        return self._watching(dataset) if self.due(count) else _NOTHING

    @contextlib.contextmanager
    def _watching(self, dataset: Any) -> Iterator[None]:
        generators = _generators(dataset)
        before = {name: _state(generator) for name, generator in generators.items()}
        start = time.perf_counter()
        yield
        moved = _moved(generators, before)
        if moved and threading.active_count() > 1:
            moved = self._without_other_threads(moved, generators, time.perf_counter() - start)
        if moved and self._is_certain(dataset, moved):
            self._report(dataset, moved)
        self._suspicious = bool(moved)

    def _is_certain(self, dataset: Any, moved: list[str]) -> bool:
        # A storage client that tries again draws its delay, once in a while and from Python's generator. So where
        # nothing that the dataset holds is known to draw, it takes two samples in a row.
        held = any(name not in _GLOBAL for name in moved)
        certain = held or self._suspicious or any(evidence for _, evidence in _evidence(dataset, "dataset"))
        if not certain:
            self._left = 0
        return certain

    @staticmethod
    def _without_other_threads(moved: list[str], generators: dict[str, Any], seconds: float) -> list[str]:
        # The global generators are every thread's. One that moves while this thread rests moves by another's hand, so
        # that nothing can be said of it: an error would stop a job that does nothing wrong.
        resting = {name: _state(generators[name]) for name in moved}
        time.sleep(min(max(seconds, QUIET_S[0]), QUIET_S[1]))
        return [name for name in moved if name not in _moved(generators, resting)]

    def _report(self, dataset: Any, moved: list[str]) -> None:
        places = [place for place, evidence in _evidence(dataset, "dataset") if evidence]
        where = f" What draws is probably {', '.join(places[:8])}." if places else ""
        message = (
            f"Producing a sample drew random numbers from {' and '.join(moved)}.{where} A cache would freeze them: "
            "every epoch would see the same augmentation. Apply the random steps after the cache, with "
            "CachedDataset(dataset, transform=random_steps); split_transform(compose) cuts a pipeline at its first "
            'random step. Or pass on_random="allow" to keep the first result of each sample.'
        )
        if self.policy == "error":
            raise RandomSampleError(message)
        self._warned = True
        warnings.warn(message, RandomSampleWarning, stacklevel=4)


def split_transform(compose: Any) -> tuple[Any, Any]:
    """Cuts a pipeline at its first random step.

    ``Compose`` of torchvision v1 and v2 and ``nn.Sequential`` are cut, nested ones inside too; anything else goes to
    one side as a whole. A step counts as random if torchvision draws parameters for it, if its class bears the name of
    a random augmentation, if it holds a generator, or if its code, its helpers' or that of anything that it holds
    names a function that draws. Other steps count as deterministic, a user's own included: if such a step is random
    after all, the randomness guard notices it in the cached part.

    Args:
        compose: a pipeline or a single callable; may be None.

    Returns:
        The deterministic steps before the cut, and the rest; None in place of an empty part.

    Example:
        >>> split_transform(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Dropout()))
        (Sequential(
          (0): Identity()
        ), Sequential(
          (0): Dropout(p=0.5, inplace=False)
        ))
    """
    if compose is None or not any(evidence for _, evidence in _evidence(compose, "")):
        return compose, None
    steps = _steps(compose)
    if steps is None:
        return None, compose
    fixed: list[Any] = []
    for i, step in enumerate(steps):
        first, rest = split_transform(step)
        fixed += [first] if first is not None else []
        if rest is not None:
            return (_rebuilt(compose, fixed) if fixed else None), _rebuilt(compose, [rest, *steps[i + 1 :]])
    return None, compose  # the evidence is in the container itself


def _steps(compose: Any) -> list[Any] | None:
    """The steps of a pipeline that runs them one after another, and does nothing else."""
    if type(compose) is torch.nn.Sequential:
        return list(compose)
    plain = _compose_classes()
    runs = getattr(type(compose), "forward", None), type(compose).__call__
    if any(isinstance(compose, cls) and runs == (getattr(cls, "forward", None), cls.__call__) for cls in plain):
        return list(compose.transforms)
    return None


def _compose_classes() -> list[type]:
    names = ("torchvision.transforms.transforms", "torchvision.transforms.v2")  # loaded wherever there is a Compose
    return [sys.modules[name].Compose for name in names if name in sys.modules]


def _rebuilt(compose: Any, steps: list[Any]) -> Any:
    if isinstance(compose, torch.nn.Sequential):
        rebuilt: Any = torch.nn.Sequential(*steps)
        rebuilt.training = compose.training
        return rebuilt
    rebuilt = copy.copy(compose)
    if isinstance(rebuilt, torch.nn.Module):
        rebuilt._modules = dict(rebuilt._modules)
    rebuilt.transforms = steps
    return rebuilt


# Generators and their states


def _generators(dataset: Any) -> dict[str, Any]:
    """The generators to watch, by the name to call them in a message."""
    found = {name: get() for name, get in _GLOBAL.items()}
    known = {id(generator) for generator in found.values()}
    for path, obj in _reachable(dataset, "dataset"):
        if isinstance(obj, _GENERATORS) and not isinstance(obj, random.SystemRandom) and id(obj) not in known:
            found[path] = obj
    return found


def _state(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.get_state() if isinstance(generator, np.random.RandomState) else generator.bit_generator.state


def _moved(generators: dict[str, Any], before: dict[str, Any]) -> list[str]:
    return [name for name, state in before.items() if not _equal(_state(generators[name]), state)]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return all(_equal(value, b[key]) for key, value in a.items())
    if isinstance(a, tuple) and any(isinstance(value, np.ndarray) for value in a):
        return all(map(_equal, a, b))
    return bool(a == b)


# What a dataset or transform holds


def _reachable(root: Any, path: str) -> Iterator[tuple[str, Any]]:
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
    elif isinstance(obj, (types.ModuleType, *_GENERATORS)):
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
            if is_helper or isinstance(found, _GENERATORS):
                yield f"{found.__module__}.{name}" if is_helper else f"the global {inner}", found


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(maxsize=1024)
def _names(code: types.CodeType) -> frozenset[str]:
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(code.co_names).union(*inner)


# Which of it is random


def _evidence(root: Any, path: str) -> Iterator[tuple[str, str]]:
    """Each object that one holds, with what tells that it is random ("" if nothing does)."""
    for where, obj in _reachable(root, path):
        if isinstance(obj, _GENERATORS):
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
