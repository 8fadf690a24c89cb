"""Locks in whose sections no signal handler runs.

A handler in Python runs in the main thread between any two of its steps. Ctrl-C raises there, and leaves half done what
must be done as a whole; another handler may use the dataset itself, in the middle of what it is doing, through locks
that its own thread holds. So the handlers of the program are set aside while the main thread is in a section, and
called at its end. Sections are short: reading the source and waiting for other processes are outside.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time

# Not from ``signal``, which tries to make an enum of each handler: that takes longer than all the rest here.
from _signal import getsignal  # type: ignore[import-not-found]
from _signal import signal as set_signal
from threading import get_ident
from types import FrameType
from typing import Any

# Those for which programs have handlers. SIGINT is set aside first, and put back last.
SIGNALS = tuple(
    int(number)
    for number in (
        signal.SIGINT, signal.SIGTERM, signal.SIGCHLD, signal.SIGALRM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1,
        signal.SIGUSR2, signal.SIGVTALRM, signal.SIGPROF,
    )
)  # fmt: skip
ATTENTION_S = 0.1  # who waits for a section runs handlers so often
AFTER_FORK_S = 0.01  # by then ``os.fork`` has returned

logger = logging.getLogger("torchcache")

_main = threading.main_thread().ident
_depth = 0  # of the sections that the main thread is in
_aside: list[tuple[int, Any]] = []  # handlers
_came: list[int] = []  # signals, meanwhile


class Section:
    """A lock that the thread which has it may take again; see the module."""

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def acquire(self, blocking: bool = True) -> bool:
        enter()
        if self._lock.acquire(False):
            return True
        leave()
        while blocking:
            enter()
            if self._lock.acquire(True, ATTENTION_S):
                return True
            leave()
        return False

    def release(self) -> None:
        self._lock.release()
        leave()

    def release_after_fork(self, in_child: bool) -> None:
        """``release`` in a hook that ``os.fork`` calls."""
        self._lock.release()
        leave_after_fork(in_child)

    def __enter__(self) -> None:
        enter()
        if not self._lock.acquire(False):
            leave()
            self.acquire()

    def __exit__(self, *exception: object) -> None:
        self._lock.release()
        leave()


class Deferred:
    """A section without a lock."""

    def __enter__(self) -> None:
        enter()

    def __exit__(self, *exception: object) -> None:
        leave()


def enter() -> None:
    """Sets the handlers aside, if this is the main thread."""
    global _aside, _depth
    if get_ident() != _main:
        return
    if not _depth:
        aside = _aside = []  # of its own: a handler that is not aside yet may enter a section
        try:
            for number in SIGNALS:
                handler = getsignal(number)
                if callable(handler):
                    aside.append((number, handler))
                    set_signal(number, _note)
        except ValueError:  # an interpreter that is not the first one of its process gets no signals
            aside.clear()
        except BaseException:  # of such a handler
            _put_back(aside)
            raise
        _aside = aside
    _depth += 1


def leave() -> None:
    """Puts the handlers back at the end of the outermost section, and calls those whose signals came."""
    global _depth
    if not _depth or get_ident() != _main:
        return
    _depth -= 1
    if _depth:
        return
    _put_back(_aside)
    while _came:
        try:
            number = _came.pop(0)
        except IndexError:  # a handler has been here meanwhile
            return
        handler = getsignal(number)
        if handler is _note:  # this is a handler, called on the way into a section or out of it
            _came.append(number)
            return
        if callable(handler):
            handler(number, sys._getframe(1))


def interrupt() -> None:
    """Raises ``KeyboardInterrupt`` if Ctrl-C was pressed: where a section has to wait, and nothing is half done.

    Raises:
        KeyboardInterrupt: unless the program handles SIGINT in a way of its own.
    """
    ours = (signal.SIGINT, signal.default_int_handler) in _aside
    if ours and signal.SIGINT in _came and get_ident() == _main:
        _came.remove(signal.SIGINT)
        raise KeyboardInterrupt


def leave_after_fork(in_child: bool) -> None:
    """``leave`` in a hook that ``os.fork`` calls, where exceptions are lost: handlers are called soon afterwards.

    In the child not at all, as the signals were the parent's.
    """
    global _depth, _main
    if in_child:  # perhaps of another thread than the one that had set them aside, which is the main thread now
        _depth, _main = 0, get_ident()
        if any(getsignal(number) is _note for number in SIGNALS):
            _put_back(_aside)
        _came.clear()
    elif _depth == 1 and _came and get_ident() == _main:
        came = _came.copy()
        try:
            threading.Thread(target=_send_again, args=(came,), name="torchcache-signals", daemon=True).start()
        except RuntimeError as error:  # no more threads: at the end of the next section
            logger.info("signals are handled later: %s", error)
            _depth = 0
            _put_back(_aside)
            return
        _came.clear()
        leave()
    else:
        leave()


def _send_again(numbers: list[int]) -> None:
    time.sleep(AFTER_FORK_S)
    for number in numbers:
        os.kill(os.getpid(), number)


def _note(number: int, frame: FrameType | None) -> None:
    _came.append(number)


def _put_back(aside: list[tuple[int, Any]]) -> None:
    raised = None
    for number, handler in reversed(aside):
        while True:
            try:
                set_signal(number, handler)
                break
            except ValueError:  # as above
                break
            except BaseException as error:  # of a handler that has been put back; this one has not
                raised = error
    if raised is not None:
        raise raised
