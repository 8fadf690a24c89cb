"""The file system under a folder, and what a memory-mapped store risks on it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import NamedTuple

_MOUNTS = Path("/proc/self/mountinfo")

# "Do not use LMDB databases on remote filesystems, even between processes on the same host. This breaks flock() on
# some OSes, possibly memory map sync, and certainly sync between programs on different hosts." (lmdb.h, Caveats)
_NETWORK = frozenset((
    "9p", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "dvs", "fhgfs", "gfs", "gfs2", "glusterfs", "gpfs",
    "lustre", "mfs", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "prl_fs", "pvfs2", "quobyte", "smb3",
    "smbfs", "vboxsf", "virtiofs", "vmhgfs", "wekafs",
))  # fmt: skip
_LAYERED = frozenset(("overlay", "aufs", "fuse.fuse-overlayfs"))


class Risk(NamedTuple):
    """What can go wrong with a store there.

    Attributes:
        kind: the type of the file system, as in ``/proc/self/mountinfo``.
        fills: whether a store may be written there all the same.
        text: what is at risk.
    """

    kind: str
    fills: bool
    text: str


def risk(folder: Path) -> Risk | None:
    """What a store in this folder, which need not exist yet, risks; ``None``: nothing out of the ordinary."""
    kind = kind_of(folder)
    if kind in _NETWORK:
        return Risk(kind, False, "a network file system promises neither what a memory map needs nor that locks end")
    if kind in _LAYERED:
        return Risk(kind, True, "this layer of a container is lost with it, and is slower than a volume")
    if kind == "fuseblk":
        return Risk(kind, True, "a crash of the program that serves this file system takes the job with it")
    if kind.startswith("fuse"):
        return Risk(kind, False, "a program serves this file system, which may not keep memory maps and locks right")
    return None


def kind_of(folder: Path) -> str:
    """The type of the file system on which a folder lies, or will lie; empty where the system does not tell."""
    try:
        mounts = _MOUNTS.read_bytes().splitlines()
    except OSError:
        return ""
    place = os.fsencode(os.path.realpath(folder))
    deepest, kind = -1, b""
    for line in mounts:
        # 27 1 254:0 / /mount\040point rw,relatime shared:1 - ext4 /dev/vda rw
        fields, _, source = line.partition(b" - ")
        point = re.sub(rb"\\([0-7]{3})", lambda code: bytes([int(code[1], 8)]), fields.split(b" ")[4])
        prefix = point.rstrip(b"/") + b"/"
        # Of two on one place the later one is on top.
        if (place + b"/").startswith(prefix) and len(prefix) >= deepest:
            deepest, kind = len(prefix), source.split(b" ")[0]
    return kind.decode("ascii", "replace")
