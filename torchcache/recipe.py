"""A cached batch on its way from a ``DataLoader`` worker: indices cross, not tensors.

A tensor crosses through shared memory: a file of ``/dev/shm``, a descriptor, a page fault for each of its pages on both
sides. Where the store is complete and its pages are in memory, the receiving process can gather the batch itself,
from its own map of the same file, in less time than it takes to receive it. So the worker sends a ``Recipe``, which
becomes the batch when it is unpickled, whichever process or thread does so.

Only where nobody can have seen the batch before: from ``default_collate`` straight into the worker's queue.
"""

from __future__ import annotations

import secrets
import weakref
from types import FrameType
from typing import Any, Protocol

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import get_worker_info

TOKEN_BYTES = 16
# The loops that put what the fetcher gives into the queue, as it is: PyTorch's, and torchdata's StatefulDataLoader's.
_WORKER_LOOPS = frozenset({"torch.utils.data._utils.worker", "torchdata.stateful_dataloader.worker"})


class Receiver(Protocol):
    """A dataset of which a batch may arrive."""

    def received(self, path: str, seal: bytes, indices: torch.Tensor) -> Any:
        """The batch that ``default_collate`` makes of some samples.

        Args:
            path: the folder of the store that has them.
            seal: the id in its seal.
            indices: which samples.
        """


_receivers: weakref.WeakValueDictionary[bytes, Receiver] = weakref.WeakValueDictionary()


def register(receiver: Receiver, token: bytes | None = None) -> bytes:
    """Makes a dataset one to which batches of its copies in workers can go.

    Args:
        receiver: the dataset.
        token: what it was known by in the process that it comes from.

    Returns:
        What it is known by here: the same, unless it is a copy of another dataset of this process.
    """
    if token is None or _receivers.setdefault(token, receiver) is not receiver:
        token = secrets.token_bytes(TOKEN_BYTES)
        _receivers[token] = receiver
    return token


def leaves_worker(fetcher: FrameType) -> bool:
    """Whether what this frame of ``_MapDatasetFetcher.fetch`` returns is sent from a worker as it is."""
    caller = fetcher.f_back
    return (
        get_worker_info() is not None
        and caller is not None
        and caller.f_code.co_name == "_worker_loop"
        and caller.f_globals.get("__name__") in _WORKER_LOOPS
    )


class Recipe:
    """A batch that the receiving process makes.

    Args:
        token: of the dataset.
        path: the folder of the store.
        seal: the id in its seal.
        indices: which samples, a tensor of int64.
    """

    def __init__(self, token: bytes, path: str, seal: bytes, indices: torch.Tensor) -> None:
        self._arguments = token, path, seal, indices.numpy().tobytes()

    def __reduce__(self) -> tuple[Any, ...]:
        return _batch, self._arguments


def _batch(token: bytes, path: str, seal: bytes, indices: bytes) -> Any:
    """What a recipe is unpickled to. An error becomes what a ``DataLoader`` raises where it hands out the batch."""
    try:
        receiver = _receivers.get(token)
        if receiver is None:  # the loader's dataset, which its iterator keeps
            raise RuntimeError(f"the dataset of a cached batch is gone in the process that reads it ({path})")
        return receiver.received(path, seal, torch.frombuffer(bytearray(indices), dtype=torch.int64))
    except Exception:
        return ExceptionWrapper(where="where a cached batch of a DataLoader worker arrived")  # type: ignore[no-untyped-call]
