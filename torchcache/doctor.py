"""What would go wrong with a cache here, and what to do: the folder, its file system, limits, memory, versions."""

from __future__ import annotations

import fcntl
import os
import platform
import resource
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from torchcache import catalog, environment, filesystem, pagecache, store
from torchcache._version import __version__
from torchcache.admission import DISK_RESERVE
from torchcache.errors import StoreUnavailableError
from torchcache.folder import refuse_strangers

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_BYTES = 1 << 30  # two workers with batches of 64 large images have this much under way
DESCRIPTORS = 1024  # an open store takes up to six, a DataLoader worker some more
_PACKAGES = ("torch", "numpy", "lmdb", "filelock")


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: was looked at.
        level: ``ok``; ``note``: works, at a price or up to a point; ``problem``: there will be no cache.
        found: what it is.
        risk: what would go wrong; empty if nothing.
        remedy: what to do about it.
    """

    what: str
    level: Literal["ok", "note", "problem"]
    found: str
    risk: str = ""
    remedy: str = ""


def examine(cache_dir: Path) -> list[Finding]:
    """Looks at everything; writes but one small file, which it removes."""
    return [*_folder(cache_dir), *_limits(), *_memory(cache_dir), *_system()]


def _folder(cache_dir: Path) -> Iterator[Finding]:
    place = next(p for p in (cache_dir, *cache_dir.parents) if p.exists())
    elsewhere = "Choose another folder with CACHE_DIR or --cache-dir"
    if not place.is_dir():
        yield Finding("folder", "problem", f"{place} is a file", "no store can be made", elsewhere)
        return
    there = f"{cache_dir}" if place == cache_dir else f"{cache_dir}, to be made in {place}"
    if os.access(place, os.W_OK | os.X_OK):
        yield Finding("folder", "ok", there)
        yield _locks(place)
    else:
        risk = "stores there can be read and not be made, and what they lack comes from the source each epoch"
        yield Finding("folder", "problem", f"{there}; not to be written by user {os.geteuid()}", risk, elsewhere)
    try:
        refuse_strangers(place)
    except StoreUnavailableError as error:
        yield Finding("owner", "note", "another user's, and writable for everybody", str(error), elsewhere)
    yield _file_system(cache_dir, elsewhere)
    yield _space(place)


def _locks(place: Path) -> Finding:
    try:
        with tempfile.NamedTemporaryFile(prefix=".torchcache-", dir=place) as first, open(first.name, "rb") as second:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
                found = "two processes get the same lock"
            except BlockingIOError:
                return Finding("locks", "ok", "flock works")
    except OSError as error:
        found = f"flock does not work: {error}"
    risk = "processes that fill cannot tell who lives, so that nothing is cached"
    return Finding("locks", "problem", found, risk, "Choose a folder on a local disk")


def _file_system(cache_dir: Path, elsewhere: str) -> Finding:
    kind, risk = filesystem.kind_of(cache_dir) or "not known", filesystem.risk(cache_dir)
    if risk is None:
        return Finding("file system", "ok", kind)
    return Finding("file system", "note" if risk.fills else "problem", kind, risk.text, elsewhere)


def _space(place: Path) -> Finding:
    disk = shutil.disk_usage(place)
    room = int(disk.free - DISK_RESERVE * disk.total)
    found = f"{_gib(disk.free)} of {_gib(disk.total)} free; {DISK_RESERVE:.0%} are left free"
    if room > 0:
        return Finding("space", "ok", f"{found}, so that {_gib(room)} can be cached")
    return Finding("space", "problem", found, "nothing more is cached", "Make room: torchcache prune --max-bytes SIZE")


def _limits() -> Iterator[Finding]:
    if SHARED_MEMORY.is_dir():
        total = shutil.disk_usage(SHARED_MEMORY).total
        small = total < SHARED_MEMORY_BYTES
        yield Finding(
            str(SHARED_MEMORY),
            "note" if small else "ok",
            _gib(total),
            "workers send batches that are not cached through it, and die of a bus error when it is full"
            if small
            else "",
            "Start the container with --shm-size=8g or --ipc=host, or use fewer workers" if small else "",
        )
    yield _limit(
        resource.RLIMIT_NOFILE,
        "open files (ulimit -n)",
        DESCRIPTORS,
        "each open store takes up to six descriptors, and DataLoader workers take more",
        "Raise it with ulimit -n 4096",
    )
    yield _limit(
        resource.RLIMIT_AS,
        "address space (ulimit -v)",
        2 * environment.MAP_SIZES[0],
        "a store cannot grow larger than what can be mapped: then it takes no more samples",
        "Lift it with ulimit -v unlimited; it is no limit on memory",
    )
    yield _limit(
        resource.RLIMIT_FSIZE,
        "file size (ulimit -f)",
        environment.MAP_SIZES[0],
        "a store that reaches it takes no more samples",
        "Lift it with ulimit -f unlimited",
    )


def _limit(which: int, what: str, enough: int, risk: str, remedy: str) -> Finding:
    soft, _ = resource.getrlimit(which)
    if soft == resource.RLIM_INFINITY or soft >= enough:
        return Finding(what, "ok", "unlimited" if soft == resource.RLIM_INFINITY else str(soft))
    return Finding(what, "note", str(soft), risk, remedy)


def _memory(cache_dir: Path) -> Iterator[Finding]:
    room = pagecache.room()
    if room is None:
        yield Finding("page cache", "note", "not known", "whether stores fit into memory cannot be told", "")
        return
    found = f"room for {_gib(room.nbytes)}, limited by {room.limit}"
    known = catalog.stores(cache_dir) if cache_dir.is_dir() else []
    larger = [info.path.name for info in known if info.nbytes > room.nbytes]
    if larger:
        risk = f"larger than that, and read from the disk again each epoch: {', '.join(larger)}"
        yield Finding("page cache", "note", found, risk, "Cache smaller samples, such as uint8 instead of float32")
    else:
        yield Finding("page cache", "ok", found)


def _system() -> Iterator[Finding]:
    if store.boot_id():
        yield Finding("boot id", "ok", "can be read")
    else:
        risk = "a store that was not finished before the machine was restarted is trusted unchecked"
        yield Finding("boot id", "note", "cannot be read", risk, "After a crash of the machine, run torchcache verify")
    packages = [f"{name} {metadata.version(name)}" for name in _PACKAGES]
    found = ", ".join([f"torchcache {__version__}", f"Python {platform.python_version()}", *packages])
    if platform.system() == "Linux":
        yield Finding("versions", "ok", f"{found}, Linux {platform.release()}")
    else:
        risk = "tested on Linux alone"
        yield Finding("versions", "note", f"{found}, {platform.system()}", risk, "Use Linux for anything that matters")


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
