"""Exact comparison of samples: types, dtypes, shapes, order, and the very bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from torchcache.flatten import flatten

# Their equality is not that of bits and order.
_EXACT = (torch.Tensor, np.ndarray, np.generic, float, complex, dict, list, tuple)
Canonical = tuple[Any, list[tuple[Any, bytes]]]


def canonical(sample: Any) -> Canonical:
    """A sample's structure and a copy of its bytes, as a store keeps them: equal for exactly the same samples alone.

    Raises:
        UnsupportedSampleError: if it holds what cannot be stored.
    """
    spec, leaves = flatten(sample)
    return spec, [(dims, bytes(data)) for dims, data in leaves]


def difference(cached: Any, source: Any, place: str = "sample") -> str:
    """What differs between the sample in a store and the source's, and where; "" if they are the same.

    Raises:
        UnsupportedSampleError: if one of them holds what cannot be stored.
    """
    if canonical(cached) == canonical(source):
        return ""
    parts, others = _parts(cached), _parts(source)
    if type(cached) is type(source) and parts is not None and others is not None and list(parts) == list(others):
        found = (difference(value, others[key], f"{place}[{key!r}]") for key, value in parts.items())
        return next(filter(None, found), "")
    if _are_equal_objects(cached, source):
        return ""
    first, second = _describe(cached), _describe(source)
    values = "other values" if first == second else second
    return f"{place} is {first} in the cache, and the source gives {values}"


def _parts(sample: Any) -> dict[Any, Any] | None:
    if type(sample) is dict:
        return sample
    return dict(enumerate(sample)) if type(sample) in (list, tuple) else None


def _are_equal_objects(cached: Any, source: Any) -> bool:
    """Whether objects say themselves that they are equal: the order of a set differs between equal ones."""
    if type(cached) is not type(source) or isinstance(cached, _EXACT):
        return False
    try:
        return (cached == source) is True
    except (RuntimeError, ValueError, TypeError):  # of arrays in it
        return False


def _describe(value: Any) -> str:
    kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
    if isinstance(value, (torch.Tensor, np.ndarray, np.generic)):
        return f"a {kind} of {value.dtype} and shape {list(value.shape)}"
    if isinstance(value, (dict, list, tuple)):
        return f"a {kind} of {len(value)}"
    text = repr(value)
    return f"{kind} {text if len(text) <= 40 else f'{text[:37]}...'}"
