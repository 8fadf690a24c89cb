"""Noticing that a dataset is no longer what it was when it was wrapped: that its attributes were set anew.

A store is of the dataset as it was then. So what is held by the dataset, and by those that it wraps, is compared by
identity when a process begins to read, when the length is asked for, as samplers do at the start of an epoch, and
before each read of the source; never for a sample that is cached. Where something was set, fingerprints decide.
What reading a sample sets, as an open file, does not count. Changes inside an attribute, as in a list or in a
transform, are not noticed.
"""

from __future__ import annotations

import operator
from typing import Any

from torchcache import bytecode
from torchcache.errors import FingerprintError
from torchcache.fingerprint import fingerprint


class Watch:
    """Watches a dataset. In another process, it begins with what the dataset is there.

    Args:
        dataset: the dataset.
        active: whether to watch; not where somebody else says what its content is.
    """

    def __init__(self, dataset: Any, active: bool = True) -> None:
        self._dataset = dataset
        self._active = active
        self._seen: dict[str, Any] | None = None
        self._as_it_was: list[tuple[dict[str, Any], dict[str, Any]]] = []  # what holds the attributes, and copies
        self.refresh()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_seen": None, "_as_it_was": []}

    def changed(self) -> list[str]:
        """The attributes that were set, since this was asked, to what counts as something else."""
        if not self._active or self._is_as_it_was():
            return []
        seen = self._seen
        self._look()
        assert self._seen is not None
        return [] if seen is None else [name for name in self._seen if _differ(name, seen, self._seen)]

    def refresh(self) -> None:
        """What was set until now does not count."""
        if self._active and not self._is_as_it_was():
            self._look()

    def _look(self) -> None:
        self._seen, holders = _attributes(self._dataset)
        self._as_it_was = [(holder, dict(holder)) for holder in holders]

    def _is_as_it_was(self) -> bool:
        """The common case, asked before and after each read: every attribute is the very same object."""
        return bool(self._as_it_was) and all(
            now.keys() == before.keys() and all(map(operator.is_, now.values(), before.values()))
            for now, before in self._as_it_was
        )


def _differ(name: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    if name in before and before[name] is now[name]:
        return False
    try:
        return name not in before or fingerprint(before[name]) != fingerprint(now[name])
    except FingerprintError:
        return True


def _attributes(dataset: Any) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The attributes of a dataset, and of those that it wraps, without those that reading sets; and what holds them."""
    found: dict[str, Any] = {}
    holders: list[dict[str, Any]] = []
    layers, met = [("dataset", dataset)], {id(dataset)}
    for path, layer in layers:
        kind: Any = type(layer)
        own = getattr(layer, "__dict__", {})
        holders.append(own)
        if not hasattr(kind, "__fingerprint__"):  # such a class says itself what counts
            drift = bytecode.drift(kind)
            found.update({f"{path}.{name}": value for name, value in own.items() if name not in drift})
        several = own.get("datasets")
        inner = [("dataset", own.get("dataset")), ("_dataset", own.get("_dataset"))]
        inner += [(f"datasets[{i}]", x) for i, x in enumerate(several)] if isinstance(several, (list, tuple)) else []
        for name, wrapped in inner:
            if id(wrapped) not in met and getattr(wrapped, "__dict__", None):
                met.add(id(wrapped))
                layers.append((f"{path}.{name}", wrapped))
    return found, holders
