"""Identity of a dataset: the same key in every process for the same content and code, and another for any other.

The walk gives every object a digest of its own, made from its class's and its state's (a Merkle tree), so equal values
count the same whether they are shared or copied.

- *Data* counts by content. Dicts and sequences are ordered, sets are not; attributes count in the order of their names.
- *Instances* count by class and by what pickle would save: ``__getstate__`` and ``__reduce__`` are honoured. A method
  ``__fingerprint__()`` says what counts in place of the state.
- *The user's code* counts by bytecode, constants, defaults, closures and the globals that it names, followed into the
  user's own modules. Line numbers, file names, docstrings, comments and annotations do not count.
- *The code of Python and of installed packages* counts by name and version. A package edited in place under an
  unchanged version is not noticed, nor is what code reaches only through ``getattr`` or ``eval``.
- *Files* count by the paths that the dataset holds, relative ones as they are written; what is in them does not count.
- *Random generators* count by their seed, never by their state, which moves with use. One that was never seeded cannot
  be identified. ``random.Random`` and ``RandomState`` do not tell their seed and are left out: a source that draws
  from them is the randomness guard's business.
- *Left out*, and listed by ``explain=True``: locks, threads, loggers, weak references, the contents of ``lru_cache``
  and ``cached_property``, and what the class's own reading methods change (see ``bytecode.drift``).
"""

from __future__ import annotations

import collections
import collections.abc
import concurrent.futures
import enum
import io
import logging
import multiprocessing.process
import pathlib
import random
import subprocess
import sys
import threading
import types
import weakref
from dataclasses import dataclass, field
from typing import Any, Literal, overload

import numpy as np
import torch

from torchcache.code import of_class, of_code, of_function, of_module
from torchcache.data import (
    WRAPPERS,
    of_array,
    of_buffer,
    of_builtin,
    of_chosen,
    of_descriptor,
    of_image,
    of_instance,
    of_mapping,
    of_member,
    of_numpy_generator,
    of_path,
    of_repr,
    of_sequence,
    of_stream,
    of_tensor,
    of_torch_generator,
    of_unordered,
    of_wrapper,
)
from torchcache.digest import hash_of
from torchcache.errors import FingerprintError
from torchcache.walk import Rule, Walk, refusal

__all__ = ["Fingerprint", "fingerprint"]

SCHEME = "torchcache fingerprint 1"  # part of every key: whatever changes what counts must change it


@dataclass(frozen=True)
class Fingerprint:
    """A key and what went into it. Printed, two of them can be compared line by line.

    Attributes:
        key: what ``fingerprint(obj)`` returns.
        parts: by attribute path, the value or a digest of it, or why it was left out.
    """

    key: str
    parts: dict[str, str] = field(hash=False)

    def __str__(self) -> str:
        return "\n".join([f"key {self.key}", *(f"{path}  {what}" for path, what in self.parts.items())])


@overload
def fingerprint(obj: object, *, explain: Literal[False] = False) -> str: ...
@overload
def fingerprint(obj: object, *, explain: Literal[True]) -> Fingerprint: ...
def fingerprint(obj: object, *, explain: bool = False) -> str | Fingerprint:
    """Identify an object by its content and code.

    Args:
        obj: a dataset, a transform, or anything else; messages call it ``dataset``.
        explain: return a `Fingerprint`, which also lists what went in and what was left out.

    Returns:
        32 hexadecimal digits, the same in every process in which the content and the code are the same.

    Raises:
        FingerprintError: something in it cannot be identified (an open file, a socket, an iterator, a generator
            without a seed); the message names the attribute.

    Example:
        >>> fingerprint([1, 2]) == fingerprint([1, 2]), fingerprint([1, 2]) == fingerprint([2, 1])
        (True, False)
    """
    parts: dict[str, str] | None = {} if explain else None
    try:
        key = hash_of(SCHEME, Walk(_rule, parts).digest(obj, "dataset")).hex()
    except RecursionError as error:
        raise FingerprintError(
            "dataset is nested too deeply to be identified. Pass key= to name its content yourself."
        ) from error
    return key if parts is None else Fingerprint(key, parts)


_LEFT_OUT: dict[str, tuple[type, ...]] = {
    "a lock": (
        type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Semaphore, threading.Event,
        threading.Barrier,
    ),
    "a thread": (threading.Thread, threading.local, concurrent.futures.ThreadPoolExecutor),
    "a logger": (logging.Logger, logging.Handler, logging.LoggerAdapter),
    "a weak reference": (
        weakref.ref, *weakref.ProxyTypes, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, weakref.WeakSet,
    ),
    "a generator that does not tell its seed": (random.Random, np.random.RandomState),
}  # fmt: skip

_RULES: tuple[tuple[tuple[type, ...], Rule], ...] = (
    ((io.BytesIO, io.StringIO), of_stream),
    ((type,), of_class),
    ((types.FunctionType,), of_function),
    (tuple(WRAPPERS), of_wrapper),
    ((types.BuiltinFunctionType, types.MethodWrapperType), of_builtin),
    (
        (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
         types.MethodDescriptorType, types.ClassMethodDescriptorType),
        of_descriptor,
    ),
    ((types.ModuleType,), of_module),
    ((types.CodeType,), of_code),
    ((torch.Tensor,), of_tensor),
    ((np.ndarray, np.generic), of_array),
    ((np.random.Generator, np.random.BitGenerator, np.random.SeedSequence), of_numpy_generator),
    ((torch.Generator,), of_torch_generator),
    ((set, frozenset), of_unordered),
    ((types.MappingProxyType,), of_mapping),
    ((bytes, bytearray, memoryview), of_buffer),
    ((enum.Enum,), of_member),
    ((np.dtype, torch.dtype, torch.device, torch.layout, torch.memory_format, torch.finfo, torch.iinfo), of_repr),
)  # fmt: skip
_EXACT: dict[type, Rule] = {
    tuple: of_sequence,
    list: of_sequence,
    dict: of_mapping,
    collections.OrderedDict: of_mapping,
    pathlib.PurePosixPath: of_path,
    pathlib.PureWindowsPath: of_path,
    pathlib.PosixPath: of_path,
    pathlib.WindowsPath: of_path,
}  # a subclass of these has state of its own
_HANDLES = (io.IOBase, subprocess.Popen, multiprocessing.process.BaseProcess, torch.Stream, torch.Event)


def _rule(kind: type) -> Rule:
    if callable(getattr(kind, "__fingerprint__", None)):
        return of_chosen
    for why, kinds in _LEFT_OUT.items():
        if issubclass(kind, kinds):
            return lambda walk, obj, path: walk.leave_out(path, why)
    synchronize = sys.modules.get("multiprocessing.synchronize")
    if synchronize and issubclass(kind, (synchronize.SemLock, synchronize.Condition, synchronize.Event)):
        return lambda walk, obj, path: walk.leave_out(path, "a lock")
    image = sys.modules.get("PIL.Image")
    if image and issubclass(kind, image.Image):
        return of_image
    rule = _EXACT.get(kind) or next((rule for kinds, rule in _RULES if issubclass(kind, kinds)), None)
    if rule is None and issubclass(kind, _HANDLES):
        return _refuse
    if rule is None and issubclass(kind, collections.abc.Iterator):
        # Reading moves a built-in iterator; one that is a class of the user's counts by its state.
        return of_instance if isinstance(kind.__next__, types.FunctionType) else _refuse
    return rule or of_instance


def _refuse(walk: Walk, obj: Any, path: str) -> bytes:
    raise refusal(obj, path, "its content is outside of the process, or changes as it is read")
