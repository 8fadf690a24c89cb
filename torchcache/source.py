"""Reading samples from the dataset that is cached."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torchcache.compare import Canonical, canonical
from torchcache.errors import RandomSampleError, UnsupportedSampleError
from torchcache.guard import RandomnessGuard


@dataclass
class Read:
    """What reading has brought.

    Attributes:
        samples: by index; those read before the error, if there was one.
        reads: how often the source was asked for a sample.
        seconds: time spent inside the source.
        error: what the source raised.
    """

    samples: dict[int, Any] = field(default_factory=dict)
    reads: int = 0
    seconds: float = 0.0
    error: BaseException | None = None


class CollatingSourceError(Exception):
    """``__getitems__`` gives no list of samples but a batch that is collated already, which cannot be cached."""


SUSPECTED_BATCHES = 4  # so many are looked at to see whether the source reuses the memory of its samples


class Source:
    """A dataset, as the fill reads it.

    Args:
        dataset: any map-style dataset.
        guard: watches it for random draws.
    """

    def __init__(self, dataset: Any, guard: RandomnessGuard) -> None:
        self._dataset = dataset
        self._guard = guard
        self._asked = False  # by ``__getitems__``, which is known to give samples
        self._collates = False  # or collated batches
        self._reuses = False  # it gives the same memory again, with other content
        self._suspected = SUSPECTED_BATCHES

    def read(self, indices: Sequence[int]) -> Read:
        """Reads samples until the source raises.

        ``__getitems__`` is used for two and more. The first time, also for one: it tells what it gives.
        """
        read = Read()
        start = time.perf_counter()
        try:
            with self._guard.watch(self._dataset, len(indices)):
                self._read(list(indices), read)
        except BaseException as error:  # whatever it is, it is raised again once the claims are in order
            if not isinstance(error, Exception) or isinstance(error, RandomSampleError):
                read.samples = {}
            read.error = error
        read.seconds = time.perf_counter() - start
        return read

    def _read(self, indices: list[int], read: Read) -> None:
        batched = getattr(self._dataset, "__getitems__", None)
        if batched is not None and not self._asked and not self._collates:
            indices = self._ask(batched, indices, read)
        if self._collates and len(indices) > 1:
            raise CollatingSourceError(f"__getitems__ of {type(self._dataset).__qualname__} gives collated batches")
        if batched is None or len(indices) < 2:
            self._read_singly(indices, read)
        else:
            found = batched(list(indices))
            if not isinstance(found, (list, tuple)) or len(found) != len(indices):
                raise ValueError(
                    f"__getitems__ was asked for {len(indices)} samples and gave {_describe(found)}; it must give a "
                    f"list of as many samples"
                )
            read.samples.update(zip(indices, found, strict=True))
            read.reads += len(indices)

    def _ask(self, batched: Any, indices: list[int], read: Read) -> list[int]:
        """Finds out, with the first sample alone, whether it gives samples; returns what is left to be read.

        A list of two collated columns would otherwise be taken for two samples when two were asked for.
        """
        try:
            found = batched(indices[:1])
        except Exception:
            if len(indices) > 1:
                raise
            return indices  # without the cache, the caller sees the error of ``__getitem__``
        read.reads += 1
        if not isinstance(found, (list, tuple)) or len(found) != 1:
            self._collates = True
            return indices
        self._asked = True
        read.samples[indices[0]] = found[0]
        return indices[1:]

    def _read_singly(self, indices: list[int], read: Read) -> None:
        suspected = len(indices) > 1 and not self._reuses and self._suspected > 0
        self._suspected -= suspected
        first: Canonical | None = None
        for index in indices:
            sample = self._dataset[index]
            read.samples[index] = _copied(sample) if self._reuses else sample
            read.reads += 1
            if suspected and index == indices[0]:
                first = _content(sample)
        if first is not None and _content(read.samples[indices[0]]) != first:
            self._reuses = True
            self._read_singly(indices, read)


def _content(sample: Any) -> Canonical | None:
    try:
        return canonical(sample)
    except UnsupportedSampleError:
        return None


def _copied(sample: Any) -> Any:
    try:
        return copy.deepcopy(sample)
    except Exception:  # a sample's own class may raise anything; it stays what it is
        return sample


def _describe(found: Any) -> str:
    of = f" of {len(found)}" if isinstance(found, (list, tuple)) else ""
    return f"a {type(found).__name__}{of}"
