"""Reading samples from the dataset that is cached."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import StackDataset, Subset

from torchcache.compare import Canonical, canonical
from torchcache.errors import RandomSampleError, UnsupportedSampleError
from torchcache.flatten import flatten
from torchcache.guard import RandomnessGuard
from torchcache.watch import Watch


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


class UncacheableSourceError(Exception):
    """The samples of the source are not what a cache could give: the message says why, and what to do."""


SUSPECTED_BATCHES = 4  # so many are looked at to see whether the source reuses the memory of its samples


class Source:
    """A dataset, as the fill reads it.

    Args:
        dataset: any map-style dataset.
        guard: watches it for random draws.
        watch: watches it for changes; None: nothing does.
    """

    def __init__(self, dataset: Any, guard: RandomnessGuard, watch: Watch | None = None) -> None:
        self._dataset = dataset
        self._guard = guard
        self._watch = watch or Watch(dataset, active=False)
        self._batched = batched_read(dataset)
        self._trusted = self._batched is None  # both ways of reading are known to give the same samples
        self._reuses = False  # it gives the same memory again, with other content
        self._suspected = SUSPECTED_BATCHES

    def read(self, indices: Sequence[int], *, singly: bool = False) -> Read:
        """Reads samples until the source raises. ``__getitems__`` is used for two and more, unless ``singly``.

        The error is an `UncacheableSourceError`, and there are no samples, if the dataset was changed since it was
        wrapped, or its ``__getitems__`` does not give the samples that its ``__getitem__`` gives.
        """
        read = Read()
        start = time.perf_counter()
        try:
            changed = self._watch.changed()
            if changed:
                raise UncacheableSourceError(changed_after_wrapping(changed))
            with self._guard.watch(self._dataset, len(indices)):
                self._read_singly(list(indices), read) if singly else self._read(list(indices), read)
        except BaseException as error:  # whatever it is, it is raised again once the claims are in order
            if not isinstance(error, Exception) or isinstance(error, (RandomSampleError, UncacheableSourceError)):
                read.samples = {}
            read.error = error
        finally:
            self._watch.refresh()
        read.seconds = time.perf_counter() - start
        return read

    def _read(self, indices: list[int], read: Read) -> None:
        if not self._trusted:
            indices = self._compare(indices, read)
        if self._batched is None or len(indices) < 2:
            self._read_singly(indices, read)
            return
        found = self._batched(list(indices))
        if not isinstance(found, (list, tuple)) or len(found) != len(indices):
            raise ValueError(
                f"__getitems__ was asked for {len(indices)} samples and gave {_describe(found)}; it must give a "
                f"list of as many samples"
            )
        read.samples.update(zip(indices, found, strict=True))
        read.reads += len(indices)

    def _compare(self, indices: list[int], read: Read) -> list[int]:
        """Finds out whether ``__getitems__`` gives what ``__getitem__`` gives; returns what is left to read.

        The first sample is read by the one and the second by the other, each alone: a list of two collated columns
        would be taken for two samples. If they are of one structure, that is enough; else the first is read by both.
        """
        first, *others = indices
        found = self._first_of_batch(first, others)
        if found is None:
            return indices
        read.reads += 1
        read.samples[first] = found[0]
        self._trusted = True
        try:
            if others:
                self._read_singly(others[:1], read)
            if others and _structure(found[0]) == _structure(read.samples[others[0]]):
                return others[1:]
            read.reads += 1
            again = self._dataset[first]
        except Exception:  # a loader, which asks for batches, would not see it
            return [index for index in others if index not in read.samples]
        if _structure(found[0]) != _structure(again):
            self._trusted = False
            raise UncacheableSourceError(
                f"__getitems__ and __getitem__ of {type(self._dataset).__qualname__} give samples of other types, of "
                f"{first} as an instance. Hugging Face's format 'numpy' does; 'torch' gives the same"
            )
        return others[1:]

    def _first_of_batch(self, index: int, others: list[int]) -> Any:
        assert self._batched is not None
        try:
            found = self._batched([index])
        except Exception:
            if others:
                raise
            return None  # without the cache, the caller sees the error of ``__getitem__``
        if not isinstance(found, (list, tuple)) or len(found) != 1:
            raise UncacheableSourceError(
                f"__getitems__ of {type(self._dataset).__qualname__} gives collated batches, not lists of samples"
            )
        return found

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


def batched_read(dataset: Any) -> Any:
    """What reads several samples at once; None if that is the same as reading one after another."""
    parts: Any = {Subset: "dataset", StackDataset: "datasets"}.get(type(dataset))
    if parts is None:
        return getattr(dataset, "__getitems__", None)
    inner = getattr(dataset, parts)
    several = inner if isinstance(inner, (list, tuple)) else inner.values() if isinstance(inner, dict) else [inner]
    return dataset.__getitems__ if any(batched_read(part) is not None for part in several) else None


def changed_after_wrapping(names: Sequence[str]) -> str:
    """The message about a dataset that is no longer what is cached."""
    return (
        f"{', '.join(names)} was set to something else after the dataset was wrapped, and what is cached is of before; "
        f"wrap it anew after such a change, or give key= if its samples stay the same"
    )


def _structure(sample: Any) -> Any:
    try:
        return flatten(sample)[0]
    except UnsupportedSampleError:
        return None


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
