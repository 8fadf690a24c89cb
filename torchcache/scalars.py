"""What a cache has done, as scalars of a training run."""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

from torchcache.dataset import CachedDataset


class Writer(Protocol):
    """What ``log_stats`` writes to: ``torch.utils.tensorboard.SummaryWriter``, or anything with this method."""

    def add_scalar(self, tag: str, scalar_value: Any, global_step: Any = None) -> Any: ...


def log_stats(writer: Writer, ds: CachedDataset, step: int) -> None:
    """Writes ``ds.stats`` as scalars ``torchcache/hits``, ``torchcache/source_reads`` and so on.

    ``hits`` and ``misses`` are this process's own: with DataLoader workers it is they who read. The others are those of
    all processes that use the store.

    Args:
        writer: a TensorBoard writer, or anything else with ``add_scalar``.
        ds: the cached dataset.
        step: of training, the scalars' place on the axis.

    Example:
        >>> log_stats(SummaryWriter(), train, step=epoch)
    """
    for name, value in dataclasses.asdict(ds.stats).items():
        writer.add_scalar(f"torchcache/{name}", value, step)
