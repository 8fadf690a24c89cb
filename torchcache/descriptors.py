"""File descriptors that are closed with the object that holds them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def close_with(holder: Any, descriptor: int, close: Callable[[int], object] = os.close) -> weakref.finalize[[int], Any]:
    """Closes a descriptor when its holder is gone, or when the result is called.

    Not when the interpreter ends: what waits to be published is published then, by whom depends on the order in which
    modules were imported, and the system closes what is left.
    """
    finalizer = weakref.finalize(holder, close, descriptor)
    finalizer.atexit = False
    return finalizer
