"""Random numbers in what is to be cached: noticing them.

A cache keeps the first result for good, so a random augmentation in the source would be the same in every epoch.
`RandomnessGuard` compares the states of the random generators before and after samples are produced; it reads states
and never draws. `split_transform` cuts a pipeline at its first random step, so that the rest can run after the cache.

What draws without a generator that the guard knows (``os.urandom``, the time, a CUDA generator, a generator that lives
only inside of a call) is not noticed.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np
import torch

from torchcache.errors import RandomSampleError, RandomSampleWarning
from torchcache.evidence import GENERATORS, reachable, signs

FIRST_SAMPLES = 16  # of each process: nearly every random pipeline draws for each sample
EVERY_SAMPLES = 1000  # afterwards; a check takes some 0.3 ms
QUIET_S = 0.01, 0.1  # least and most to wait in order to see whether another thread draws

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
        certain = held or self._suspicious or any(sign for _, sign in signs(dataset, "dataset"))
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
        places = [place for place, sign in signs(dataset, "dataset") if sign]
        where = f" What draws is probably {', '.join(places[:8])}." if places else ""
        message = (
            f"Producing a sample drew random numbers from {' and '.join(moved)}.{where} A cache would freeze them: "
            "every epoch would see the same augmentation. Apply the random steps after the cache, with "
            "CachedDataset(dataset, transform=random_steps); CachedDataset.split(dataset) does so with the transforms "
            'of the dataset itself. Or pass on_random="allow" to keep the first result of each sample.'
        )
        if self.policy == "error":
            raise RandomSampleError(message)
        self._warned = True
        warnings.warn(message, RandomSampleWarning, stacklevel=4)


# Generators and their states


def _generators(dataset: Any) -> dict[str, Any]:
    """The generators to watch, by the name to call them in a message."""
    found = {name: get() for name, get in _GLOBAL.items()}
    known = {id(generator) for generator in found.values()}
    for path, obj in reachable(dataset, "dataset"):
        if isinstance(obj, GENERATORS) and not isinstance(obj, random.SystemRandom) and id(obj) not in known:
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
