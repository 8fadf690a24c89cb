"""One collective call a step: every rank's message to every other, each with the size of the next one."""

from __future__ import annotations

import contextlib
import itertools
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from torchcache import memory
from torchcache.messages import Message, Received, unpack

_HEADER = struct.Struct("<QQ")  # bytes of the next message between the two, whether the sender has failed
_HEADER_BYTES = 64  # with padding: the message after it starts at a multiple of 64
_REASON_CHARACTERS = 1000


class Delivery:
    """Brings every rank the messages of all others, step by step: ``write``, ``start``, ``finish``.

    A receiver must know how much is coming. So that this takes no call of its own, a message is announced by the one
    before it, and the first by ``announce``. All ranks must make the same calls; between ``start`` and ``finish`` each
    may write the next messages.

    Args:
        group: the process group; used and held by nobody else.
        rank: this process's.
    """

    def __init__(self, group: Any, rank: int) -> None:
        self._group = group
        self._process = os.getpid()
        self._rank = rank
        self._expected: list[int] = []  # bytes of the next message from each rank
        self._written = self._sent = self._got = torch.empty(0, dtype=torch.uint8)
        self._sizes: list[int] = []  # of what is written
        self._failure: BaseException | None = None  # of what is written
        self._sent_failure: BaseException | None = None
        self._work: Any = None

    @property
    def closed(self) -> bool:
        return self._group is None

    def close(self) -> None:
        """Ends the process group, and with it its threads.

        One of them that lets go of a tensor while the interpreter ends would abort the process.
        """
        if self._group is None or os.getpid() != self._process:  # in a forked child there are no such threads
            return
        group, self._group, self._work = self._group, None, None
        if dist.is_initialized():
            with contextlib.suppress(ValueError):  # all groups have been ended
                dist.destroy_process_group(group)

    def announce(self, sizes: Sequence[int]) -> None:
        """Tells each rank how many bytes the first message to it will have."""
        ours = torch.tensor(sizes)
        theirs = torch.empty_like(ours)
        dist.all_to_all_single(theirs, ours, group=self._group)
        self._expected = theirs.tolist()

    def write(self, messages: Sequence[Message], failure: BaseException | None) -> None:
        """Makes the next messages ready.

        Args:
            messages: one for each rank, of the sizes that were announced; the one to ourselves is not sent.
            failure: why they are not what they should be.
        """
        self._sizes = self._framed([message.nbytes for message in messages])
        self._written = _at_least(sum(self._sizes), self._written)
        self._failure = failure
        if failure is None:
            try:
                for rank, part in self._parts(self._written, self._sizes):
                    messages[rank].write_to(part[_HEADER_BYTES:])
            except BaseException as error:  # raised when every rank knows
                self._failure = error

    def start(self, following: Sequence[int]) -> None:
        """Sends what is written.

        Args:
            following: the sizes of the messages of the next step.
        """
        for rank, part in self._parts(self._written, self._sizes):
            _HEADER.pack_into(part.data, 0, following[rank], self._failure is not None)
        expected = self._framed(self._expected)
        self._got = _at_least(sum(expected), self._got)
        self._written, self._sent = self._sent, self._written
        self._sent_failure = self._failure
        self._work = dist.all_to_all_single(
            self._got[: sum(expected)],
            self._sent[: sum(self._sizes)],
            expected,
            self._sizes,
            group=self._group,
            async_op=True,
        )

    def finish(self) -> list[Received]:
        """Waits for what the others have sent us, and returns it: views that the next ``start`` overwrites.

        Raises:
            BaseException: our own failure, now that every rank knows of it.
            RuntimeError: if another rank has failed; then all ranks raise.
        """
        work, self._work = self._work, None
        work.wait()
        failed = self._sent_failure is not None
        found = []
        for rank, part in self._parts(self._got, self._framed(self._expected)):
            self._expected[rank], other_failed = _HEADER.unpack_from(part.data)
            failed = failed or bool(other_failed)
            found.append(part[_HEADER_BYTES:])
        if failed:
            self._raise()
        return [received for part in found for received in unpack(part)]

    def _raise(self) -> None:
        failure = self._sent_failure
        reason = "" if failure is None else f"{type(failure).__name__}: {failure}"[:_REASON_CHARACTERS]
        reasons = [""] * len(self._expected)
        dist.all_gather_object(reasons, reason, group=self._group)
        if failure is not None:
            raise failure
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason)
        raise RuntimeError(f"rank {rank} could not read a sample of this step: {reason}")

    def _framed(self, sizes: Sequence[int]) -> list[int]:
        return [0 if rank == self._rank else _HEADER_BYTES + size for rank, size in enumerate(sizes)]

    def _parts(self, buffer: torch.Tensor, sizes: Sequence[int]) -> list[tuple[int, np.ndarray[Any, Any]]]:
        """For each other rank its part of a buffer."""
        array = buffer.numpy()
        parts = enumerate(zip(sizes, itertools.accumulate(sizes), strict=True))
        return [(rank, array[end - size : end]) for rank, (size, end) in parts if rank != self._rank]


def _at_least(nbytes: int, buffer: torch.Tensor) -> torch.Tensor:
    """A buffer of this size: the same one as long as it is large enough, since new memory costs a fault a page."""
    return buffer if len(buffer) >= nbytes else memory.empty((nbytes,), torch.uint8)
