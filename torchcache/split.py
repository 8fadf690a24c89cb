"""Cutting a pipeline at its first random step, so that what comes before it is cached and the rest runs on each read.

`split_transform` cuts a pipeline. `split_dataset` cuts those of a dataset, which applies them itself, somewhere inside
of its ``__getitem__``: there a stand-in runs the first part and gives a `_Pending`, which holds the result. So it can
be seen, of each sample, where in it a result lies and in which order the results were made, and the rest is applied to
these places in this order.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torchcache.errors import UnsupportedSampleError
from torchcache.evidence import signs

__all__ = ["split_dataset", "split_transform"]


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
    if compose is None or not any(sign for _, sign in signs(compose, "")):
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


_ATTRIBUTES = ("transform", "target_transform", "transforms")  # as torchvision calls them
_numbers = itertools.count()
_Path = tuple[Any, ...]
_Call = tuple[int, tuple[tuple[_Path, ...], ...]]  # which pipeline, and for each result the places where it lies


class _Pending:
    """What the first part of a pipeline has given; the rest is not applied yet."""

    __slots__ = ("call", "count", "item", "pipeline", "value")

    def __init__(self, call: int, pipeline: int, item: int, count: int, value: Any) -> None:
        self.call, self.pipeline, self.item, self.count, self.value = call, pipeline, item, count, value


class _Made(threading.local):
    """What a thread has made of `_Pending` while it reads."""

    def __init__(self) -> None:
        self.pending: list[_Pending] = []


_made = _Made()


@contextlib.contextmanager
def _all_found() -> Iterator[list[_Pending]]:
    """A context in which to read, and to note what is found in the samples: that must be everything that was made."""
    before, _made.pending = _made.pending, []
    found: list[_Pending] = []
    try:
        yield found
        if len({id(pending) for pending in found}) < len(_made.pending):
            raise _refusal("its samples do not hold all that its transform gives, as it is")
    except UnsupportedSampleError:
        raise
    except Exception as error:
        if _Pending.__name__ not in str(error):
            raise
        raise _refusal(f"it uses what its transform gives ({error})") from error
    finally:
        _made.pending = before


class _First:
    """Stands in for a pipeline: applies its first part, and marks the results."""

    def __init__(self, pipeline: int, first: Any) -> None:
        self._pipeline, self._first = pipeline, first

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if named or any(type(value) is _Pending for value in inputs):
            raise _refusal(f"its transform is called {'by keyword' if named else 'with the result of another one'}")
        results = inputs if self._first is None else self._first(*inputs)
        if self._first is None or len(inputs) == 1:
            results = inputs if self._first is None else (results,)
        elif not isinstance(results, (tuple, list)) or len(results) != len(inputs):
            raise _refusal(f"its transform takes {len(inputs)} values and gives {type(results).__qualname__}")
        call, count = next(_numbers), len(results)
        pending = [_Pending(call, self._pipeline, item, count, value) for item, value in enumerate(results)]
        _made.pending += pending
        return pending[0] if count == 1 else tuple(pending)

    def __repr__(self) -> str:
        return f"the first part of a pipeline: {self._first!r}"

    def __fingerprint__(self) -> Any:
        return self._pipeline, self._first


class SplitDataset:
    """A dataset whose pipelines are cut: its samples are pairs of a sample before the rest, and what `Rest` needs.

    Args:
        dataset: with `_First` in the places of its pipelines.
    """

    def __init__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: Any) -> Any:
        with _all_found() as found:
            return _located(self.dataset[index], found)

    def _read_many(self, indices: Sequence[int]) -> Any:
        with _all_found() as found:
            samples = self.dataset.__getitems__(indices)
            return [_located(x, found) for x in samples] if isinstance(samples, (list, tuple)) else samples

    def __getattr__(self, name: str) -> Any:
        dataset = self.__dict__.get("dataset")
        if name == "__getitems__" and hasattr(dataset, name):
            return self._read_many
        if dataset is None or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(dataset, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.dataset, name, value)

    def __getstate__(self) -> Any:
        return self.dataset

    def __setstate__(self, dataset: Any) -> None:
        self.__dict__["dataset"] = dataset

    def __repr__(self) -> str:
        return repr(self.dataset)

    def __fingerprint__(self) -> Any:
        return self.dataset


def _located(sample: Any, found: list[_Pending]) -> tuple[Any, tuple[_Call, ...]]:
    """A sample with values in the place of `_Pending`, and where they are; those are added to ``found``."""
    places: list[tuple[_Pending, _Path]] = []
    plain = _plain(sample, (), places)
    found += [pending for pending, _ in places]
    calls: dict[int, tuple[int, list[list[_Path]]]] = {}
    for pending, path in places:
        _, paths = calls.setdefault(pending.call, (pending.pipeline, [[] for _ in range(pending.count)]))
        paths[pending.item].append(path)
    ordered = [calls[call] for call in sorted(calls)]
    return plain, tuple([(pipeline, tuple(map(tuple, paths))) for pipeline, paths in ordered])


def _plain(value: Any, path: _Path, places: list[tuple[_Pending, _Path]]) -> Any:
    if type(value) is _Pending:
        places.append((value, path))
        return value.value
    if isinstance(value, dict):
        parts: Any = value.items()
    elif isinstance(value, (tuple, list)):
        parts = enumerate(value)
    else:
        return value
    count = len(places)
    new = [(key, _plain(part, (*path, key), places)) for key, part in parts]
    return value if len(places) == count else _replaced(value, dict(new))


def _replaced(value: Any, new: dict[Any, Any]) -> Any:
    """A container like another one, which is the dataset's own, with other contents."""
    if not isinstance(value, tuple):
        result = copy.copy(value)
        for key, part in new.items():
            result[key] = part
        return result
    parts = [new.get(i, part) for i, part in enumerate(value)]
    return value._make(parts) if hasattr(value, "_make") else type(value)(parts)


def _get(sample: Any, path: _Path) -> Any:
    for key in path:
        sample = sample[key]
    return sample


def _put(sample: Any, path: _Path, value: Any) -> Any:
    if not path:
        return value
    return _replaced(sample, {path[0]: _put(sample[path[0]], path[1:], value)})


def _refusal(why: str) -> UnsupportedSampleError:
    return UnsupportedSampleError(
        f"CachedDataset.split cannot cut the transforms of this dataset: {why}. Give the dataset the part to be cached "
        f"as its transform, and the random part to CachedDataset(dataset, transform=...), in a function that applies "
        f"it to the right part of a sample; split_transform cuts a pipeline"
    )


class Rest:
    """Applies the rest of each pipeline to a sample of a `SplitDataset`.

    Args:
        parts: the rest of each pipeline.
    """

    def __init__(self, parts: Sequence[Any]) -> None:
        self._parts = parts

    def __call__(self, pair: tuple[Any, Sequence[_Call]]) -> Any:
        sample, calls = pair
        for pipeline, places in calls:
            given = self._parts[pipeline](*[_get(sample, paths[0]) for paths in places])
            results = [given] if len(places) == 1 else given
            for paths, result in zip(places, results, strict=True):
                for path in paths:
                    sample = _put(sample, path, result)
        return sample

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._parts!r})"


def split_dataset(dataset: Any) -> tuple[Any, Rest] | None:
    """Cuts the pipelines of a dataset.

    Args:
        dataset: with a pipeline in one of its attributes ``transform``, ``target_transform`` and ``transforms``. It is
            not changed.

    Returns:
        A copy of the dataset that gives samples to be cached, and the rest, to be applied to these; None if nothing
        in the pipelines is random.

    Raises:
        TypeError: if the dataset has no pipeline.
    """
    attributes = getattr(dataset, "__dict__", {})
    pipelines = {name: attributes[name] for name in _ATTRIBUTES if attributes.get(name) is not None}
    if not pipelines:
        raise TypeError(
            f"a {type(dataset).__qualname__} has no transform, target_transform or transforms of its own to cut. Split "
            f"the dataset that has: Subset(CachedDataset.split(dataset), indices)"
        )
    parts: list[Any] = []
    changed = {name: _cut(pipeline, parts) for name, pipeline in pipelines.items()}
    if not parts:
        return None
    result = copy.copy(dataset)
    for name, pipeline in changed.items():
        setattr(result, name, pipeline)
    return SplitDataset(result), Rest(parts)


def _cut(pipeline: Any, parts: list[Any]) -> Any:
    """What takes the place of a pipeline; the rest of it is added to ``parts``."""
    vision = sys.modules.get("torchvision.datasets.vision")
    if vision and type(pipeline) is vision.StandardTransform:
        both = (pipeline.transform, pipeline.target_transform)
        return vision.StandardTransform(*[part if part is None else _cut(part, parts) for part in both])
    first, rest = split_transform(pipeline)
    if rest is None:
        return pipeline
    parts.append(rest)
    return _First(len(parts) - 1, first)
