"""Stores that are damaged, or made to do harm. Run as a program: reads many of them, and says what became of each.

A finding is anything but a right sample or an error of torchcache's: another exception, a signal, a store that
executes something, memory beyond reason.
"""

from __future__ import annotations

import copy
import json
import os
import random
import re
import shutil
import struct
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lmdb
import torch
from helpers import Source, image_and_label
from torch.utils.data import DataLoader, default_collate

import torchcache
from torchcache import CachedDataset, errors
from torchcache.block import HEAD_BYTES, BlockHead

LENGTH = 60
MOST_BYTES = 1500 << 20  # of memory that reading a hostile store of some 100 KB may take, PyTorch included
EXTREMES = (0, 1, -1, 7, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 40, (1 << 63) - 1, -(1 << 63), 1 << 62, 1 << 48)
PAGE = 4096


def sample(index: int) -> Any:
    """Fixed, ragged, text, plain data, an object, an optional part: something of each kind of column."""
    extra = {"box": list(range(20)), "when": range(index)} if index % 3 else None
    return (*image_and_label(index), torch.full((1 + index % 5, 2), index), "x" * index, extra)


def source(log: Path) -> Source:
    return Source(LENGTH, log, sample)


def damage(data: Path, rng: random.Random) -> None:
    """Bits, words and pages anywhere in the file, or its end cut off."""
    content = bytearray(data.read_bytes())
    for _ in range(rng.choice([1, 1, 4, 40])):
        position = rng.randrange(len(content))
        page = position // PAGE * PAGE
        match rng.randrange(5):
            case 0:
                content[position] ^= 1 << rng.randrange(8)
            case 1:
                content[page : page + PAGE] = bytes(PAGE)
            case 2:
                content[page : page + PAGE] = rng.randbytes(PAGE)
            case 3:
                content[position : position + 8] = rng.choice([b"\xff" * 8, bytes(8), rng.randbytes(8)])
            case _ if rng.random() < 0.2:
                del content[position:]
                break
    data.write_bytes(content)


def attack(folder: Path, rng: random.Random) -> None:
    """A valid LMDB file with records that say what they like; checksums fit, where they would be looked at.

    And the file of an owner who has died, or never was, which may claim everything.
    """
    if rng.random() < 0.3:
        (folder / "owners").mkdir(exist_ok=True)
        claims = struct.pack(f"<Q{LENGTH}q", LENGTH, *range(LENGTH))
        (folder / "owners" / f"{rng.randbytes(16).hex()}.lock").write_bytes(_words(claims, rng))
    with lmdb.open(str(folder), max_dbs=8, map_size=1 << 30) as env:
        names = (b"meta", b"schemas", b"blocks", b"ids", b"index")
        dbs = {name: env.open_db(name) for name in names}
        for target in rng.sample(list(_TARGETS), rng.choice([1, 1, 1, 3])):
            with env.begin(write=True, buffers=False) as txn:
                entries = list(txn.cursor(db=dbs[target]))
                if not entries:
                    entries.append((rng.randbytes(16), struct.pack("<q", rng.randrange(LENGTH))))
                key, value = rng.choice(entries)
                changed = _TARGETS[target](key, value, rng)
                if changed is None:
                    txn.delete(key, db=dbs[target])
                else:
                    txn.put(key, changed, db=dbs[target])


def _number(rng: random.Random) -> int:
    return rng.choice(EXTREMES) if rng.random() < 0.7 else rng.randrange(-1000, 100_000)


def _words(value: bytes, rng: random.Random, first: int = 0) -> bytes:
    """Some 8-byte words at absurd values; or a length that nobody expects."""
    words = bytearray(value)
    if rng.random() < 0.1:
        return bytes(words[: rng.randrange(len(words) + 1)]) + rng.randbytes(rng.choice([0, 3, 9]))
    for _ in range(rng.choice([1, 1, 2, 8])):
        if len(words) >= first + 8:
            position = rng.randrange(first, len(words) - 7)
            if rng.random() < 0.8:
                position = first + (position - first) // 8 * 8
            words[position : position + 8] = struct.pack("<q", _number(rng))
    return bytes(words)


def _meta(key: bytes, value: bytes, rng: random.Random) -> bytes | None:
    if key != b"identity" or rng.random() < 0.1:
        return _words(value, rng) if rng.random() < 0.9 else None
    identity = json.loads(value)
    field = rng.choice([*identity, "unknown"])
    identity[field] = rng.choice([_number(rng), None, "x", "\udc00", [], {"a": 1}, 1e308, True, "9" * 5000])
    return json.dumps(identity).encode()


def _schema(key: bytes, value: bytes, rng: random.Random) -> bytes | None:
    if rng.random() < 0.15:
        return rng.choice(
            [b"", b"[" * 100_000, b"\xff\xfe", b"{}", b"null", b'{"shapes":[],"spec":["tuple",[]]}', b"9" * 10_000]
        )
    parsed = json.loads(value)
    for _ in range(rng.choice([1, 1, 2, 4])):
        _twist(parsed, rng)
    return json.dumps(parsed).encode()


def _twist(parsed: Any, rng: random.Random) -> None:
    """Changes one node of some JSON."""
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], (dict, list)):
                walk(node[key])

    walk(parsed)
    node, key = rng.choice(places)
    others = [n[k] for n, k in places]
    deep: Any = ["bytes"]
    for _ in range(200):
        deep = ["tuple", [deep]]
    node[key] = rng.choice(
        [
            *(_number(rng), None, "", "os", True, 1.5, [], {}, deep, [[]], ["none"], ["pickle"], ["registered", []]),
            *("tensor", "ndarray", "dict", "namedtuple", "enum", "dataclass", "sparse", "pil", "listof", "json"),
            ["namedtuple", "posix", "stat_result", ["x"], [["int"]]],
            ["enum", ["os", "system"], [["str"]]],
            ["dataclass", ["subprocess", "Popen", ["args"]], [["str"]]],
            ["ndarray", '"|O"', 1, 0],
            ["ndarray", '"<f8"', _number(rng), _number(rng)],
            ["tensor", "float32", _number(rng), [0, 0], 1],
            ["npscalar", '"<U1000000000"'],
            [_number(rng)] * 5,
            copy.deepcopy(rng.choice(others)),
        ]
    )


def _ids(key: bytes, value: bytes, rng: random.Random) -> bytes | None:
    return _words(value, rng, rng.choice([0, 32, 32, 56])) if rng.random() < 0.95 else None


def _block(key: bytes, value: bytes, rng: random.Random) -> bytes | None:
    if rng.random() < 0.05:
        return None
    head = BlockHead.read(value)
    body = _words(value[HEAD_BYTES:], rng)
    if rng.random() < 0.5:
        return value[:HEAD_BYTES] + body
    return _sealed(head, body)


def _sealed(head: BlockHead, body: bytes) -> bytes:
    """With the same id and counts, and a checksum that fits."""
    whole = BlockHead(head.block_id, head.schema_id, head.count, head.nbytes, head.checksum_of(body))
    return whole.pack() + body


def _index(key: bytes, value: bytes, rng: random.Random) -> bytes | None:
    if rng.random() < 0.05 or len(value) < HEAD_BYTES:
        return None
    head = BlockHead.read(value)
    first = rng.choice([0, 0, 16, 64, 128])  # the counts, or what follows them
    return _sealed(head, _words(value[HEAD_BYTES:], rng, first))


_TARGETS: dict[bytes, Callable[[bytes, bytes, random.Random], bytes | None]] = {
    b"meta": _meta,
    b"schemas": _schema,
    b"blocks": _block,
    b"ids": _ids,
    b"index": _index,
}


def read_all(cached: CachedDataset, collates: bool) -> list[Any]:
    samples = [cached[i] for i in range(len(cached))]
    cached.__getitems__(list(range(len(cached))))
    for loader in (DataLoader, torchcache.DataLoader):
        list(loader(cached, batch_size=7, collate_fn=list))
        if collates:
            list(loader(cached, batch_size=7))
    return samples


def batches_collate(samples: list[Any]) -> bool:
    try:
        for first in range(0, len(samples), 7):
            default_collate(samples[first : first + 7])
    except Exception:
        return False
    return True


def without_source(folder: Path, log: Path) -> str:
    cached = CachedDataset.open(folder)
    read_all(cached, batches_collate([cached[i] for i in range(min(14, len(cached)))]))
    return "read"


def with_source(folder: Path, log: Path) -> str:
    """The job must go on, whatever is there: these errors are the user's to hear, and no others."""
    try:
        cached = CachedDataset(
            source(log), cache_dir=folder.parent, name=folder.name.removesuffix("-k"), key="k", check=0
        )
        read_all(cached, False)
        cached.close()
    except (errors.StoreMismatchError, errors.FormatVersionError, errors.NotAStoreError) as error:
        return type(error).__name__
    return "gone on"


def peak_bytes() -> int:
    """The most memory that this process has had; not ``ru_maxrss``, which begins with that of who started it."""
    found = re.search(r"^VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main() -> None:
    """Arguments: folder of a complete store, of an incomplete one, the log of reads, first and last seed."""
    complete, partial, log = (Path(argument) for argument in sys.argv[1:4])
    warnings.simplefilter("ignore")
    os.system = os.popen = lambda *_: os._exit(99)  # type: ignore[assignment]
    outcomes: Counter[str] = Counter()
    for seed in range(int(sys.argv[4]), int(sys.argv[5])):
        rng = random.Random(seed)
        original, read = rng.choice([(complete, without_source), (complete, with_source), (partial, with_source)])
        folder = original.parent / f"hostile-{seed}-k"
        shutil.copytree(original, folder)
        print(f"seed {seed} {original.name} {read.__name__}", end=" ", file=sys.stderr, flush=True)
        if rng.random() < 0.5:
            damage(folder / "data.mdb", rng)
        else:
            attack(folder, rng)
        try:
            outcome = read(folder, log)
        except (errors.StoreError, errors.UnsupportedSampleError) as error:
            outcome = type(error).__name__
            if read is with_source:
                raise
        used = peak_bytes()
        print(f"{outcome}, {used >> 20} MiB", file=sys.stderr)
        outcomes[outcome] += 1
        if used > MOST_BYTES:
            sys.exit(f"{used:,} bytes of memory: see {folder}")
        for left in folder.parent.glob(f"hostile-{seed}*"):
            shutil.rmtree(left)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
