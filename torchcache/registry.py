"""Classes that the user has registered, and the classes that a process has imported.

A name in a cache file leads to a class only if the process has imported it or registered it; nothing is ever imported
because a file says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

Flatten = Callable[[Any], tuple[Sequence[Any], Any]]
Unflatten = Callable[[list[Any], Any], Any]


class Registration(NamedTuple):
    """How objects of a class are taken apart, and put together again."""

    cls: type
    flatten: Flatten
    unflatten: Unflatten


_registrations: dict[tuple[str, str], Registration] = {}


def record(found: Registration) -> None:
    """Keeps what the user has registered."""
    _registrations[found.cls.__module__, found.cls.__qualname__] = found


def registration(module: str, qualname: str) -> Registration | None:
    """What was registered for the class of that name."""
    return _registrations.get((module, qualname))


def find_class(module: str, qualname: str) -> Any:
    """The class of that name, if its module has already been imported; else ``None``."""
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        # Not getattr: a module may import another one when it is asked for a name.
        found = getattr(found, "__dict__", {}).get(part)
    return found if isinstance(found, type) else None


def type_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
