"""How code counts: functions, classes and modules, followed from what the bytecode names."""

from __future__ import annotations

import dis
import enum
import importlib.util
import itertools
import os
import pathlib
import types
from typing import Any

from torchcache import bytecode
from torchcache.digest import condense, hash_of
from torchcache.packages import find_spec, is_exported, package_of
from torchcache.walk import Walk

NOT_CONTENT = frozenset(
    [
        "__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "__firstlineno__", "__static_attributes__",
        "__slots__", "_abc_impl", "__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__",
        "__abstractmethods__", "__parameters__", "__orig_bases__", "__type_params__", "__dataclass_fields__",
        "__dataclass_params__", "__slotnames__",
    ]
)  # of a class: what follows from the rest, or has no influence on what the class does  # fmt: skip
_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: set for classes made at run time, clear for those built into a library
_FLAGS = 0x3FF  # of code objects: those that change what the code does


def of_class(walk: Walk, cls: Any, path: str) -> bytes:
    name = f"{cls.__module__}.{cls.__qualname__}".replace("__mp_main__", "__main__")  # as spawned workers call it
    package = package_of(cls.__module__)
    if package and (is_exported(cls) or not cls.__flags__ & _HEAP_TYPE):
        return hash_of("class", name.encode(), package.encode())
    drift = bytecode.drift(cls)
    parts = [name.encode()]
    for key, value in sorted(_class_content(cls).items()):
        if drift.get(key) == bytecode.COUNTER:
            walk.leave_out(f"{path}.{key}", bytecode.COUNTER)
        else:
            parts += [key.encode(), walk.digest(value, f"{path}.{key}")]
    bases = [base for base in (*cls.__bases__, type(cls)) if base not in (object, type)]
    return hash_of("class", *parts, *(walk.digest(base, f"{path}.{base.__name__}") for base in bases))


def of_function(walk: Walk, obj: types.FunctionType, path: str) -> bytes:
    package = package_of(obj.__module__)
    if package and is_exported(obj):
        return hash_of("function", f"{obj.__module__}.{obj.__qualname__}".encode(), package.encode())
    code, home = obj.__code__, obj.__globals__.get("__name__")
    package = package_of(home)  # of what was defined there: a decorator's wrapper bears the name of what it wraps
    if package:
        parts = [f"{home}.{getattr(code, 'co_qualname', code.co_name)}".encode(), package.encode()]
    else:
        parts = [of_code(walk, code, path), of_references(walk, obj, path)]
    extras = {key: value for key, value in vars(obj).items() if key != "__wrapped__"}
    for name, content in (("__defaults__", obj.__defaults__), ("__kwdefaults__", obj.__kwdefaults__)):
        parts.append(walk.digest(content, f"{path}.{name}") if content else b"")
    parts.append(walk.state(obj, extras, path))
    for name, cell in zip(code.co_freevars, obj.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # a name that is bound later
            value = NotImplemented
        parts.append(walk.digest(value, f"{path}.__closure__[{name!r}]"))
    return hash_of("function", *parts)


def of_code(walk: Walk, code: types.CodeType, path: str) -> bytes:
    named = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    lines = [f"{code.co_argcount} {code.co_posonlyargcount} {code.co_flags & _FLAGS} {named} {code.co_freevars}"]
    steps = bytecode.instructions(code)
    for step, then in itertools.zip_longest(steps, steps[1:]):
        what = f"{step.arg} {step.argrepr}"
        if step.opcode in dis.hasconst:
            unused = then is not None and then.opname == "STORE_NAME" and then.argval in NOT_CONTENT
            what = "" if unused else of_constant(walk, step.argval, path).hex()
        lines.append(f"{step.opname} {what}")
    return hash_of("code", "\n".join(lines).encode("utf-8", "surrogatepass"), getattr(code, "co_exceptiontable", b""))


def of_constant(walk: Walk, value: Any, path: str) -> bytes:
    return of_code(walk, value, path) if isinstance(value, types.CodeType) else walk.alone().digest(value, path)


def of_references(walk: Walk, function: types.FunctionType, path: str) -> bytes:
    """What a function's code names outside of itself: globals, attributes of the user's modules, late imports."""
    space = function.__globals__
    names, imports, assigned = bytecode.mentions(function.__code__)
    parts = []
    for name in sorted(names.keys() & space.keys() - {"__name__"}):  # which is another in spawned workers
        value, where = space[name], f"{path}.__globals__[{name!r}]"
        if isinstance(value, types.ModuleType):
            parts += [of_attribute(walk, value, chain, where) for chain in sorted(names[name])]
        else:
            content = walk.unless_drifting(value, where, assigned.get(name))
            parts += [name.encode(), content] if content is not None else []
    parts += [of_import(walk, target, space.get("__package__"), path) for target in imports]
    return hash_of("references", *parts)


def of_attribute(walk: Walk, value: Any, chain: tuple[str, ...], path: str) -> bytes:
    """``module.a.b`` as far as it leads through the user's modules: only what is used of them counts."""
    names = iter(chain)
    while isinstance(value, types.ModuleType) and not package_of(value.__name__):
        name = next(names, None)
        if name is None or name not in vars(value):
            break
        value, path = vars(value)[name], f"{path}.{name}"
    return hash_of(".".join(chain), walk.digest(value, path))


def of_module(walk: Walk, obj: types.ModuleType, path: str) -> bytes:
    package = package_of(obj.__name__)
    if package:
        return hash_of("module", obj.__name__.encode(), package.encode())
    if obj.__spec__ is None:  # made by hand, or the main script
        return walk.digest({key: value for key, value in vars(obj).items() if not key.startswith("__")}, path)
    return of_source(walk, obj.__spec__, path)


def of_source(walk: Walk, spec: Any, path: str) -> bytes:
    """The code of a whole module of the user's, imported or not, and of those that it imports."""
    if spec.name not in walk.sources:
        walk.sources[spec.name] = b"underway"
        code = spec.loader.get_code(spec.name) if hasattr(spec.loader, "get_code") else None
        if code is not None:
            imports = (of_import(walk, target, spec.parent, path) for target in bytecode.mentions(code)[1])
            walk.sources[spec.name] = hash_of("source", of_code(walk, code, path), *imports)
        elif spec.origin and os.path.isfile(spec.origin):  # compiled
            walk.sources[spec.name] = hash_of("binary", condense(pathlib.Path(spec.origin).read_bytes()))
    return walk.sources[spec.name]


def of_import(walk: Walk, target: tuple[int, str, tuple[str, ...]], parent: str | None, path: str) -> bytes:
    level, name, attributes = target
    parts = []
    for late in (name, *(f"{name}.{attribute}" if name else attribute for attribute in attributes)):
        full = importlib.util.resolve_name("." * level + late, parent) if level and parent else late
        spec = find_spec(full)
        if spec is not None:  # otherwise not installed, or not a module but something in one
            package = package_of(full)
            parts.append(hash_of("import", full.encode(), package.encode() if package else of_source(walk, spec, path)))
    return hash_of("imports", *parts)


def _class_content(cls: Any) -> dict[str, Any]:
    """The attributes of a class that count."""
    content = {key: value for key, value in vars(cls).items() if key not in NOT_CONTENT}
    if not issubclass(cls, enum.Enum):
        return content
    # An Enum keeps its members in several private tables.
    own = {key: value for key, value in content.items() if not (key.startswith("_") and key.endswith("_"))}
    methods = {key: value for key, value in content.items() if isinstance(value, types.FunctionType)}
    return own | methods | {key: member.value for key, member in cls.__members__.items()}
