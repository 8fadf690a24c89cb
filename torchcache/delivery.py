"""One collective call a step: every rank's message to every other, each with the size of the next one."""

from __future__ import annotations

import itertools
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchcache.messages import Message, Received, unpack

_HEADER = struct.Struct("<QQ")  # bytes of the next message between the two, whether the sender has failed
_HEADER_BYTES = 64  # with padding: the message after it starts at a multiple of 64
_REASON_CHARACTERS = 1000


class Delivery:
    """Brings every rank the messages of all others, step by step. All ranks must call the same methods.

    A receiver must know how much is coming. So that this takes no call of its own, a message is announced by the one
    before it, and the first by ``announce``.

    Args:
        group: the process group; used by nobody else.
        rank: this process's.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._rank = rank
        self._expected: list[int] = []  # bytes of the next message from each rank
        self._sent = self._got = torch.empty(0, dtype=torch.uint8)

    def announce(self, sizes: Sequence[int]) -> None:
        """Tells each rank how many bytes the first message to it will have."""
        ours = torch.tensor(sizes)
        theirs = torch.empty_like(ours)
        dist.all_to_all_single(theirs, ours, group=self._group)
        self._expected = theirs.tolist()

    def deliver(
        self, messages: Sequence[Message], following: Sequence[int], failure: BaseException | None
    ) -> list[Received]:
        """Sends each rank its message, and returns what the others have sent us: views that the next call overwrites.

        Args:
            messages: one for each rank, of the sizes that were announced; the one to ourselves is not sent.
            following: the sizes of those of the next call.
            failure: why the messages are not what they should be.

        Raises:
            BaseException: the failure, when every rank knows of it.
            RuntimeError: if another rank has failed; then all ranks raise.
        """
        others = [rank for rank in range(len(messages)) if rank != self._rank]
        sizes = self._framed([message.nbytes for message in messages])
        self._sent = _at_least(sum(sizes), self._sent)
        parts = _split(self._sent, sizes)
        if failure is None:
            try:
                for rank in others:
                    messages[rank].write_to(parts[rank][_HEADER_BYTES:])
            except BaseException as error:  # raised again when every rank knows
                failure = error
        for rank in others:
            _HEADER.pack_into(parts[rank].data, 0, following[rank], failure is not None)

        expected = self._framed(self._expected)
        self._got = _at_least(sum(expected), self._got)
        got, sent = self._got[: sum(expected)], self._sent[: sum(sizes)]
        dist.all_to_all_single(got, sent, expected, sizes, group=self._group)
        parts = _split(got, expected)
        failed = failure is not None
        for rank in others:
            self._expected[rank], other_failed = _HEADER.unpack_from(parts[rank].data)
            failed = failed or bool(other_failed)
        if failed:
            self._raise(failure)
        return [received for rank in others for received in unpack(parts[rank][_HEADER_BYTES:])]

    def _framed(self, sizes: Sequence[int]) -> list[int]:
        return [0 if rank == self._rank else _HEADER_BYTES + size for rank, size in enumerate(sizes)]

    def _raise(self, failure: BaseException | None) -> None:
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_REASON_CHARACTERS]
        reasons = [""] * len(self._expected)
        dist.all_gather_object(reasons, reason, group=self._group)
        if failure is not None:
            raise failure
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        raise RuntimeError(f"rank {rank} could not read a sample of this step: {reason}")


def _at_least(nbytes: int, buffer: torch.Tensor) -> torch.Tensor:
    """A buffer of this size: the same one as long as it is large enough, since new memory costs a fault a page."""
    return buffer if len(buffer) >= nbytes else torch.empty(nbytes, dtype=torch.uint8)


def _split(buffer: torch.Tensor, sizes: Sequence[int]) -> list[np.ndarray[Any, Any]]:
    """The parts of a buffer that have these sizes, one after another."""
    array = buffer.numpy()
    ends = itertools.accumulate(sizes)
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]
