"""What a sample is taken apart into: a spec, and leaves.

A *spec* is the structure of a sample without its values: nested tuples of strings and integers, hashable and
JSON-like. A *leaf* is ``(dims, data)``: the shape of one value and its bytes.
"""

from __future__ import annotations

from typing import Any

import torch

Spec = tuple[Any, ...]
Dims = tuple[int, ...]
Leaf = tuple[Dims, Any]  # (shape, bytes-like of one dimension)

MAX_DEPTH = 100  # levels of nesting; deeper is a sample that contains itself, or a hostile file
DTYPE_NAMES = {d: str(d).removeprefix("torch.") for d in vars(torch).values() if isinstance(d, torch.dtype)}
NUMBER_DTYPES = {"int": "<i8", "float": "<f8", "bool": "|b1"}


class Leaves(list[Leaf]):
    """The leaves of a sample, in the order in which its spec names them.

    Attributes:
        allow_pickle: whether what cannot be stored otherwise may be pickled.
    """

    def __init__(self, allow_pickle: bool = False) -> None:
        self.allow_pickle = allow_pickle
