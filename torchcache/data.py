"""How data counts: containers, arrays, tensors, images, random generators, and objects by what pickle would save."""

from __future__ import annotations

import copyreg
import enum
import functools
import pathlib
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from torchcache.digest import ATOMS, condense, hash_of, number, tensor_buffers
from torchcache.packages import is_exported, package_of
from torchcache.walk import BULK_ROWS, Walk, refusal

WRAPPERS: dict[type, tuple[str, ...]] = {  # what counts of each
    property: ("fget", "fset", "fdel"),
    functools.cached_property: ("func",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    types.MethodType: ("__self__", "__func__"),
    functools.partial: ("func", "args", "keywords"),
    type(functools.lru_cache(len)): ("__wrapped__",),
}
UNSEEDED_NUMPY_BITS = 96  # NumPy draws 128 bits of entropy when no seed is given
UNSEEDED_TORCH_BITS = 48  # torch.Generator.seed() draws 64 bits; the default seed has 46


def of_sequence(walk: Walk, obj: Sequence[Any], path: str) -> bytes:
    return hash_of(type(obj).__name__, number(len(obj)), walk.column(obj, path))


def of_mapping(walk: Walk, obj: Any, path: str) -> bytes:
    keys, values = list(obj), list(obj.values())
    walk.quiet += 1
    tag = hash_of(type(obj).__name__, number(len(keys)), walk.column(keys, f"{path}.keys()"))
    walk.quiet -= 1
    if len(keys) >= BULK_ROWS:
        return hash_of("dict", tag, walk.column(values, f"{path}.values()"))
    names = [repr(key) if type(key) in ATOMS else "..." for key in keys]
    pairs = zip(names, values, strict=True)
    return hash_of("dict", tag, *[walk.digest(value, f"{path}[{name}]") for name, value in pairs])


def of_unordered(walk: Walk, obj: Any, path: str) -> bytes:
    kind = type(obj)
    # Each element alone: the order of a set differs between processes, and so would what a shared walk knows.
    walks = (walk if type(element) in ATOMS else walk.alone() for element in obj)
    members = sorted(walk.digest(element, f"{path}{{...}}") for walk, element in zip(walks, obj, strict=True))
    own = b"" if kind in (set, frozenset) else subclass_part(walk, obj, path)
    return hash_of("set" if issubclass(kind, set) else "frozenset", own, *members)


def subclass_part(walk: Walk, obj: Any, path: str) -> bytes:
    """What an instance of a subclass adds to the built-in type that it is."""
    return walk.digest(type(obj), f"{path}.__class__") + walk.state(obj, getattr(obj, "__dict__", {}), path)


def of_buffer(walk: Walk, obj: Any, path: str) -> bytes:
    return hash_of(type(obj).__name__, condense(obj.tobytes() if isinstance(obj, memoryview) else obj))


def of_stream(walk: Walk, obj: Any, path: str) -> bytes:
    return hash_of(type(obj).__name__, walk.digest(obj.getvalue(), path))  # not the position, which reading moves


def of_array(walk: Walk, obj: Any, path: str) -> bytes:
    kind, plain = type(obj), np.asarray(obj)
    if isinstance(obj, np.ma.MaskedArray):
        mask, fill = np.ma.getmaskarray(obj), np.asarray(obj.fill_value)
        own = walk.digest(kind, f"{path}.__class__") + of_array(walk, mask, path) + of_array(walk, fill, path)
    else:
        own = b"" if kind in (np.ndarray, np.memmap) else subclass_part(walk, obj, path)
    if plain.dtype.names:  # field by field: the padding between fields is arbitrary
        content = b"".join(of_array(walk, plain[name], path) for name in plain.dtype.names)
    elif plain.dtype.hasobject:
        content = walk.column(plain.ravel().tolist(), path)
    else:
        content = condense(np.ascontiguousarray(plain).reshape(-1).view(np.uint8)) if plain.nbytes else b""
    return hash_of("array", own, repr(plain.dtype).encode(), repr(plain.shape).encode(), content)


def of_tensor(walk: Walk, obj: torch.Tensor, path: str) -> bytes:
    kind = type(obj)
    if obj.is_nested:  # the attributes of the jagged ones are caches
        own = walk.digest(kind, f"{path}.__class__")
    else:
        own = b"" if kind is torch.Tensor else subclass_part(walk, obj, path)
    shape = "nested" if obj.is_nested else list(obj.shape)
    form = f"{obj.dtype} {shape} {obj.layout} {obj.device.type} {obj.requires_grad}"
    try:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            parts = [condense(part) for part in tensor_buffers(obj)]
    except (RuntimeError, NotImplementedError, TypeError) as error:
        raise refusal(obj, path, f"its bytes cannot be read ({error})") from error
    return hash_of("tensor", own, form.encode(), *parts)


def of_image(walk: Walk, obj: Any, path: str) -> bytes:
    content = obj.tobytes()  # reads a file that was opened lazily, which may change mode and info
    info = walk.digest(obj.info, f"{path}.info")
    return hash_of("image", f"{obj.mode} {obj.size} {obj.getpalette()}".encode(), info, condense(content))


def of_member(walk: Walk, obj: enum.Enum, path: str) -> bytes:
    return hash_of("enum", walk.digest(type(obj), f"{path}.__class__"), walk.digest(obj.value, f"{path}.value"))


def of_path(walk: Walk, obj: pathlib.PurePath, path: str) -> bytes:
    return hash_of("path", walk.digest(type(obj), f"{path}.__class__"), str(obj).encode("utf-8", "surrogatepass"))


def of_repr(walk: Walk, obj: Any, path: str) -> bytes:
    return hash_of(type(obj).__name__, repr(obj).encode())


def of_numpy_generator(walk: Walk, obj: Any, path: str) -> bytes:
    bits = getattr(obj, "bit_generator", obj)
    seed = bits if isinstance(bits, np.random.SeedSequence) else getattr(bits, "seed_seq", None)
    if not isinstance(seed, np.random.SeedSequence) or seed.entropy is None:
        raise refusal(obj, path, "its seed is not known")
    if isinstance(seed.entropy, int) and seed.entropy.bit_length() > UNSEEDED_NUMPY_BITS:
        raise refusal(obj, path, "it was made without a seed, so it is another one in each process")
    entropy = np.atleast_1d(np.asarray(seed.entropy, dtype=object)).tolist()
    seeds = [list(map(int, entropy)), list(map(int, seed.spawn_key)), seed.pool_size]
    return hash_of(f"{type(obj).__name__} {type(bits).__name__}", walk.alone().digest(seeds, path))


def of_torch_generator(walk: Walk, obj: torch.Generator, path: str) -> bytes:
    seed = obj.initial_seed()
    if seed.bit_length() > UNSEEDED_TORCH_BITS:
        raise refusal(obj, path, "its seed was drawn at random, so it is another one in each process")
    return hash_of("torch.Generator", f"{obj.device.type} {seed}".encode())


def of_instance(walk: Walk, obj: Any, path: str) -> bytes:
    kind = type(obj)
    if callable(obj) and (package := package_of(kind.__module__)) and is_exported(obj):
        return hash_of("name", obj.__module__.encode(), obj.__qualname__.encode(), package.encode())
    try:
        reduce = copyreg.dispatch_table.get(kind)
        reduced = reduce(obj) if reduce else obj.__reduce_ex__(4)
    except Exception as error:  # a class's own code, which may raise anything to say that it cannot be pickled
        raise refusal(obj, path, f"its content cannot be identified ({error})") from error
    if isinstance(reduced, str):
        return hash_of("name", f"{kind.__module__} {getattr(obj, '__module__', '')} {reduced}".encode())
    make, args, state, items, pairs = (*reduced, None, None, None)[:5]
    if make is getattr(copyreg, "__newobj__", None):
        make, args = args[0], args[1:]
    own = walk.digest(make, f"{path}.__class__" if make is kind else f"{path}.__reduce__()[0]")
    own += walk.digest(args, path) if args else b""
    content = [walk.column(list(items), path)] if items is not None else []
    content += [walk.digest(dict(pairs), path)] if pairs is not None else []
    return hash_of("instance", own, walk.state(obj, state, path), *content)


def of_chosen(walk: Walk, obj: Any, path: str) -> bytes:
    """An object that says itself what counts."""
    content = walk.digest(obj.__fingerprint__(), f"{path}.__fingerprint__()")
    return hash_of("chosen", walk.digest(type(obj), f"{path}.__class__"), content)


def of_wrapper(walk: Walk, obj: Any, path: str) -> bytes:
    kind = next(kind for kind in type(obj).__mro__ if kind in WRAPPERS)
    own = walk.digest(type(obj), f"{path}.__class__") if kind is not type(obj) else b""
    parts = [walk.digest(getattr(obj, name), f"{path}.{name}") for name in WRAPPERS[kind]]
    return hash_of(kind.__name__, own, *parts)


def of_builtin(walk: Walk, obj: Any, path: str) -> bytes:
    owner = obj.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return hash_of("builtin", f"{obj.__module__}.{obj.__qualname__}".encode())
    return hash_of("builtin", obj.__name__.encode(), walk.digest(owner, f"{path}.__self__"))


def of_descriptor(walk: Walk, obj: Any, path: str) -> bytes:
    return hash_of("descriptor", f"{obj.__objclass__.__qualname__}.{obj.__name__}".encode())
