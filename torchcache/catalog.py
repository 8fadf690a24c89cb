"""The stores under a cache folder: what they hold, whether they are right, and getting rid of them.

Nothing here fills a store, imports what its samples are made of, or counts as a use of it.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from torchcache import folder, owner, pagecache, store, usage
from torchcache.contents import (
    ColumnInfo,
    Description,
    SchemaInfo,
    VerifyReport,
    compare,
    describe,
    verify,
)
from torchcache.environment import DATA_FILE
from torchcache.errors import (
    FormatVersionError,
    NotAStoreError,
    StoreError,
    StoreUnavailableError,
    UnsupportedSampleError,
)
from torchcache.records import Counters, Identity
from torchcache.store import Store

__all__ = [
    "ColumnInfo",
    "Description",
    "Pruned",
    "SchemaInfo",
    "StoreInfo",
    "VerifyReport",
    "compare",
    "data_bytes",
    "describe",
    "destroy",
    "inspect",
    "prune",
    "stores",
    "verify",
    "warm",
]

State = Literal[
    "complete", "filling", "partial", "empty", "damaged", "other version", "unreadable", "set aside", "leftover"
]
EMPTY_AGE_S = 60.0  # a job makes its store before it reads its first sample: an empty one is left alone for so long
_SET_ASIDE = re.compile(r".+\.damaged-[0-9a-f]{8}")
_LEFTOVER = re.compile(r".+\.removed-[0-9a-f]{8}")


@dataclass(frozen=True)
class StoreInfo:
    """What can be told of a store without reading it.

    Attributes:
        path: its folder.
        state: ``complete``; ``filling``: somebody is bringing samples into it; ``partial``: nobody is; ``empty``;
            ``damaged``; ``other version``: of the format; ``unreadable``, such as for lack of permission;
            ``set aside``: damaged, and another has taken its place; ``leftover`` of one that was being removed.
        problem: of a damaged or unreadable one, what is wrong; else empty.
        key: identity of the content; ``None``, like all that follows to ``source_seconds``, where it cannot be read.
        source: qualified name of the dataset's class.
        samples: how many are cached.
        length: how many the dataset has.
        source_reads: how often the source was asked for a sample, by all processes in all runs.
        source_seconds: how long that took, added up over all processes.
        hits: source reads saved: samples that came from the store, as processes have recorded when they ended.
        hits_by_day: the same by day, in days since 1970-01-01 (UTC); ``usage.EARLIER`` for all older ones.
        nbytes: what the folder takes on the disk, in bytes.
        resident_bytes: how much of it is in memory; ``None`` where the system does not tell.
        last_used: when a process last opened it to use it, wrote to it, or recorded its hits; seconds since 1970.
        filling: how many processes are bringing samples into it.
        in_use: whether a process has it open.
    """

    path: Path
    state: State
    problem: str
    key: str | None
    source: str | None
    samples: int | None
    length: int | None
    source_reads: int | None
    source_seconds: float | None
    hits: int
    hits_by_day: dict[int, int]
    nbytes: int
    resident_bytes: int | None
    last_used: float
    filling: int
    in_use: bool


class _Found(NamedTuple):
    """What reading a store has brought."""

    identity: Identity | None = None
    counters: Counters | None = None
    error: Exception | None = None


def stores(cache_dir: Path) -> list[StoreInfo]:
    """The stores under a cache folder, and what is left of others, in the order of their names.

    What torchcache did not make is left out. A folder that is not there has no stores.
    """
    return [info for path in _folders(cache_dir) if (info := inspect(path)) is not None]


def _folders(cache_dir: Path) -> list[Path]:
    try:
        return sorted(path for path in cache_dir.iterdir() if path.is_dir() and not path.is_symlink())
    except FileNotFoundError:
        return []


def inspect(path: Path) -> StoreInfo | None:
    """What can be told of the store in a folder; ``None`` if there is none, nor what is left of one."""
    leftover = _leftover(path)
    if not leftover and not _looks_like_a_store(path):
        return None
    found = _Found() if leftover else _read(path)
    if isinstance(found.error, NotAStoreError) and not _was_ours(path):
        return None
    filling, in_use = _filling(path), folder.in_use(path)
    identity, counters, used = found.identity, found.counters, usage.read(path)
    try:
        return StoreInfo(
            path=path,
            state=leftover or _state(found, filling),
            problem="" if found.error is None else str(found.error),
            key=None if identity is None else identity.key,
            source=None if identity is None else identity.source,
            samples=None if counters is None else counters.samples,
            length=None if identity is None else identity.length,
            source_reads=None if counters is None else counters.source_reads,
            source_seconds=None if counters is None else counters.source_seconds,
            hits=used.total,
            hits_by_day=used.days,
            nbytes=_disk_bytes(path),
            resident_bytes=pagecache.resident_bytes(path / DATA_FILE),
            last_used=folder.last_used(path),
            filling=filling,
            in_use=in_use,
        )
    except FileNotFoundError:  # somebody has removed it meanwhile
        return None


def _leftover(path: Path) -> Literal["set aside", "leftover"] | None:
    if _SET_ASIDE.fullmatch(path.name):
        return "set aside"
    return "leftover" if _LEFTOVER.fullmatch(path.name) else None


def _looks_like_a_store(path: Path) -> bool:
    with contextlib.suppress(StoreError, OSError):
        folder.refuse_foreign(path)
        return (path / DATA_FILE).exists() or (path / folder.GUARD_FILE).exists()
    return False


def _was_ours(path: Path) -> bool:
    return (path / folder.GUARD_FILE).exists()


def _read(path: Path) -> _Found:
    if not (path / DATA_FILE).exists() or not (path / DATA_FILE).stat().st_size:
        return _Found(counters=Counters())  # its creation was interrupted
    try:
        with Store.look(path) as opened:
            return _Found(opened.identity, opened.counters())
    except (StoreError, UnsupportedSampleError, OSError, ValueError) as error:
        return _Found(error=error)


def _state(found: _Found, filling: int) -> State:
    if isinstance(found.error, FormatVersionError):
        return "other version"
    if isinstance(found.error, StoreUnavailableError | UnsupportedSampleError):
        return "unreadable"
    if found.error is not None or found.counters is None:
        return "damaged"
    if found.identity is not None and 0 < found.identity.length <= found.counters.samples:
        return "complete"
    if filling:
        return "filling"
    return "partial" if found.counters.samples else "empty"


def _filling(path: Path) -> int:
    try:
        return owner.count_alive(path / folder.OWNERS)
    except (OSError, NotImplementedError):  # no locks here, and nobody can fill
        return 0


def _disk_bytes(path: Path) -> int:
    total = 0
    for file in path.rglob("*"):
        with contextlib.suppress(OSError):
            total += 512 * file.lstat().st_blocks
    return total


@dataclass(frozen=True)
class Pruned:
    """What ``prune`` has done, or would do.

    Attributes:
        removed: each store that went, and why.
        nbytes: what they took on the disk, in bytes.
        left_bytes: what the others take.
    """

    removed: list[tuple[StoreInfo, str]]
    nbytes: int
    left_bytes: int


def destroy(path: Path, force: bool = False) -> None:
    """Removes a store, or what is left of one.

    Args:
        path: its folder.
        force: also while processes use it, which keep what they have mapped, and read what is missing from the source.

    Raises:
        NotAStoreError: if the folder holds anything else.
        StoreUnavailableError: if somebody uses it, or it cannot be removed.
    """
    if not path.is_dir() or not (_leftover(path) or _looks_like_a_store(path)):
        raise NotAStoreError(f"{path} holds no store, and is left as it is")
    folder.refuse_foreign(path)
    with folder.unused(path) as free:
        filling = _filling(path)
        if not force and (filling or not free):
            who = f"{filling} processes are filling it" if filling else "a process has it open"
            raise StoreUnavailableError(f"{path} is in use: {who}; wait for the job, or force it (rm --force)")
        try:
            store.destroy(path)
        except OSError as error:
            raise StoreUnavailableError(f"{path} cannot be removed: {error}") from error


def prune(
    cache_dir: Path, max_bytes: int | None = None, older_than_s: float | None = None, dry_run: bool = False
) -> Pruned:
    """Removes stores that nobody uses: what is damaged, empty or left over, then by age, then by size.

    Args:
        cache_dir: the folder of the stores.
        max_bytes: remove the least recently used ones until the others take no more than this.
        older_than_s: remove those that were last used longer ago than this, in seconds.
        dry_run: only say which.

    Raises:
        StoreUnavailableError: if one cannot be removed.
    """
    found = sorted(stores(cache_dir), key=lambda info: info.last_used)
    left = sum(info.nbytes for info in found)
    reasons = [(info, _reason(info, time.time() - info.last_used, older_than_s)) for info in found]
    by_size = [(info, "least recently used") for info, reason in reasons if not reason and info.state != "empty"]
    removed: list[tuple[StoreInfo, str]] = []
    for info, reason in [pair for pair in reasons if pair[1]] + by_size:
        needed = (info, reason) not in by_size or (max_bytes is not None and left > max_bytes)
        if needed and not info.in_use and not info.filling and (dry_run or _destroyed(info.path)):
            removed.append((info, reason))
            left -= info.nbytes
    return Pruned(removed, sum(info.nbytes for info, _ in removed), left)


def _reason(info: StoreInfo, age_s: float, older_than_s: float | None) -> str:
    if info.state in ("set aside", "leftover", "damaged") or (info.state == "empty" and age_s > EMPTY_AGE_S):
        return info.state
    return "not used for so long" if older_than_s is not None and age_s > older_than_s else ""


def _destroyed(path: Path) -> bool:
    try:
        destroy(path)
    except StoreUnavailableError:
        if folder.in_use(path) or _filling(path):  # since we have looked
            return False
        raise
    return True


def data_bytes(path: Path) -> int:
    """The size of a store's data file in bytes.

    Raises:
        NotAStoreError: if there is none.
    """
    if not _looks_like_a_store(path) or not (path / DATA_FILE).exists():
        raise NotAStoreError(f"{path} holds no store")
    return (path / DATA_FILE).stat().st_size


def warm(path: Path, force: bool = False, progress: Callable[[int], object] = lambda nbytes: None) -> int:
    """Reads a store into the page cache, and returns its size in bytes.

    Args:
        path: its folder.
        force: also if it does not fit, so that its beginning is dropped for its end.
        progress: told of each piece how many bytes it has.

    Raises:
        StoreError: if there is no store.
        StoreUnavailableError: if it does not fit.
    """
    file = path / DATA_FILE
    missing, room = data_bytes(path) - (pagecache.resident_bytes(file) or 0), pagecache.room()
    if not force and room is not None and missing > room.nbytes:
        raise StoreUnavailableError(
            f"{path} does not fit into memory: {missing} bytes of it are to be read, and {room.limit} leaves "
            f"{room.nbytes}; the part read first would be dropped for the last. Force it to read it all the same"
        )
    return pagecache.load(file, progress)
