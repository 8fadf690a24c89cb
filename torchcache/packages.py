"""Whose code it is: an installed package's, which a version identifies, or the user's own."""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import pathlib
import sys
import sysconfig
from typing import Any


def is_exported(obj: Any) -> bool:
    """Whether an object is what its module has under its name, so that the name tells all about it."""
    target: Any = sys.modules.get(getattr(obj, "__module__", None) or "")
    for name in getattr(obj, "__qualname__", "?").split("."):
        target = getattr(target, name, None)
    return target is obj


@functools.cache
def package_of(module: str | None) -> str | None:
    """Name and version of the installed package, or Python, that a module belongs to; None for the user's own."""
    top = (module or "").partition(".")[0]
    if top in ("", "__main__", "__mp_main__"):
        return None
    if top == "torchcache":
        return top
    loaded = sys.modules.get(str(module))
    spec = getattr(loaded, "__spec__", None) if loaded else find_spec(str(module))
    origin = getattr(loaded, "__file__", None) or getattr(spec, "origin", None) or ""
    if {"site-packages", "dist-packages"} & set(pathlib.PurePath(origin).parts):
        version = _version(top)
        return None if version is None else f"{top} {version}"
    standard = {os.path.realpath(sysconfig.get_path(name)) for name in ("stdlib", "platstdlib")}
    if origin in ("built-in", "frozen") or any(os.path.realpath(origin).startswith(root + os.sep) for root in standard):
        return f"python {sys.version_info.major}.{sys.version_info.minor}"
    return None


def find_spec(module: str) -> Any:
    """The spec of a module, or None. Imports nothing, not even the packages around it, as find_spec() would."""
    top, *inner = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # such as the main script, which has none
        return None
    for name in inner:
        top = f"{top}.{name}"
        places = spec.submodule_search_locations if spec else None
        spec = importlib.machinery.PathFinder.find_spec(top, places) if places else None
    return spec


def _version(top: str) -> str | None:
    # Metadata first: it reads the same whether or not the package has been imported yet.
    try:
        return importlib.metadata.version(top)
    except importlib.metadata.PackageNotFoundError:
        names = importlib.metadata.packages_distributions().get(top)
    if names:
        return importlib.metadata.version(names[0])
    version = getattr(sys.modules.get(top), "__version__", None)
    return str(version) if version is not None else None
