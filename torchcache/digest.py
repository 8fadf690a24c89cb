"""Short stand-ins for contents: hashes of values, of large buffers and of the bytes of tensors."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import struct
from collections.abc import Callable
from typing import Any

import torch

from torchcache.serial import contiguous

KEY_BYTES = 16
CHUNK_BYTES = 4 << 20  # large buffers are hashed in pieces, in threads: hashlib lets go of the GIL
SMALL_BYTES = 1 << 16  # a shorter buffer goes into its parent's hash as it is

ATOMS: dict[type, Callable[[Any], bytes]] = {
    str: lambda value: value.encode("utf-8", "surrogatepass"),
    int: lambda value: format(value, "x").encode(),
    bool: lambda value: b"1" if value else b"0",
    float: struct.Struct("<d").pack,
    complex: lambda value: struct.pack("<dd", value.real, value.imag),
    type(None): lambda value: b"",
    type(Ellipsis): lambda value: b"",
    type(NotImplemented): lambda value: b"",
}


def hash_of(tag: str, *contents: bytes) -> bytes:
    hasher = hashlib.blake2b(tag.encode(), digest_size=KEY_BYTES)
    for content in contents:
        hasher.update(b"%d:" % len(content))
        hasher.update(content)
    return hasher.digest()


def number(value: int) -> bytes:
    return value.to_bytes(8, "little")


def condense(buffer: Any) -> bytes:
    """A short stand-in for a buffer. SHA-256, for which processors have instructions: blake2b takes 3 times as long."""
    view = memoryview(buffer)
    if view.nbytes <= SMALL_BYTES:
        return view.tobytes()
    view = view.cast("B")
    chunks = [view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES)]
    if len(chunks) == 1:
        return b"1" + hashlib.sha256(view).digest()
    with concurrent.futures.ThreadPoolExecutor(min(len(chunks), os.cpu_count() or 1, 8)) as pool:
        leaves = pool.map(lambda chunk: hashlib.sha256(chunk).digest(), chunks)
        return number(len(view)) + hashlib.sha256(b"".join(leaves)).digest()


def tensor_buffers(tensor: torch.Tensor) -> list[Any]:
    if tensor.is_nested:
        parts = list(tensor.unbind())
    elif tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    elif tensor.is_quantized:
        parts = [tensor.int_repr(), tensor.dequantize()]
    elif tensor.device.type == "meta":
        return []
    else:
        plain = contiguous(tensor.detach().cpu())
        return [plain.reshape(-1).view(torch.uint8).numpy()]
    return [buffer for part in parts for buffer in (repr(list(part.shape)).encode(), *tensor_buffers(part))]
