"""Threads that work in turns, whose results come in the order in which the work was given."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, NamedTuple

Task = Callable[[], Any]


class Results(NamedTuple):
    """What the tasks of a group have returned, up to the one that raised."""

    values: list[Any]
    error: BaseException | None = None


class Turns:
    """Threads of which each has a queue of its own, and takes the next group of tasks in its turn.

    ``concurrent.futures`` would do, and takes a fifth longer for an epoch of small batches: a lock and a condition for
    each result, which threads that want the interpreter's lock wait for.

    The threads end with this object, with ``close``, or with the interpreter: a thread that is inside PyTorch when the
    interpreter has gone would abort the process.

    Args:
        count: how many threads.
        name: of the threads.
    """

    def __init__(self, count: int, name: str) -> None:
        self._todo: list[SimpleQueue[Sequence[Task] | None]] = [SimpleQueue() for _ in range(count)]
        self._done: list[SimpleQueue[Results]] = [SimpleQueue() for _ in range(count)]
        self._given = self._taken = 0
        threads = [
            threading.Thread(target=_work, args=queues, name=f"{name}-{number}", daemon=True)
            for number, queues in enumerate(zip(self._todo, self._done, strict=True))
        ]
        self.close = weakref.finalize(self, _end, self._todo, threads)
        for thread in threads:
            thread.start()

    def __len__(self) -> int:
        """How many groups were given whose results were not taken."""
        return self._given - self._taken

    def give(self, group: Sequence[Task]) -> None:
        self._todo[self._given % len(self._todo)].put(group)
        self._given += 1

    def take(self) -> Results:
        """The results of the oldest group; waits for them."""
        results = self._done[self._taken % len(self._done)].get()
        self._taken += 1
        return results


def _work(todo: SimpleQueue[Sequence[Task] | None], done: SimpleQueue[Results]) -> None:
    while True:
        group = todo.get()
        if group is None:
            return
        values: list[Any] = []
        error = None
        try:
            values.extend(task() for task in group)
        except BaseException as raised:  # for who takes the results
            error = raised
        done.put(Results(values, error))
        del group, values, error  # nothing is held while waiting


def _end(todo: list[SimpleQueue[Sequence[Task] | None]], threads: list[threading.Thread]) -> None:
    for queue in todo:
        queue.put(None)
    for thread in threads:
        if thread.ident is not None:
            thread.join()
