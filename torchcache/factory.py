"""The user's dataset, from ``MODULE:FACTORY`` on the command line."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from pathlib import Path
from typing import Any

from torchcache.dataset import CachedDataset
from torchcache.errors import StoreError
from torchcache.location import CACHE_DIR_VARIABLE


class FactoryError(Exception):
    """The user's code did not give a dataset; says where, and what to do."""


def cached_dataset(spec: str, cache_dir: Path | None) -> CachedDataset:
    """The dataset of a factory, cached.

    Args:
        spec: ``module:name``; the module is looked for in the working folder first.
        cache_dir: becomes ``$CACHE_DIR``, so that it holds for a factory that does the wrapping itself, too.

    Raises:
        FactoryError: if it gives none.
        StoreError: if its store cannot be used.
    """
    if cache_dir is not None:
        os.environ[CACHE_DIR_VARIABLE] = str(cache_dir.expanduser().absolute())
    made = _make(spec)
    if isinstance(made, CachedDataset):
        return made
    try:
        return CachedDataset(made)
    except StoreError:
        raise
    except (TypeError, ValueError) as error:
        raise FactoryError(f"{spec} gives what cannot be cached: {error}") from error


def _make(spec: str) -> Any:
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise FactoryError(f"{spec!r} is not MODULE:FACTORY, such as train:make_dataset")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # whatever the user's module raises is the user's mistake
        raise FactoryError(f"{module_name} cannot be imported: {described(error)}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise FactoryError(f"{module_name} has no {name}")
        found = getattr(found, part)
    if hasattr(found, "__getitem__") and not isinstance(found, type):
        return found
    if not callable(found):
        raise FactoryError(f"{spec} is a {type(found).__name__}, neither a dataset nor a function that makes one")
    try:
        return found()
    except (Exception, SystemExit) as error:
        raise FactoryError(f"{spec} raised {described(error)}") from error


def described(error: BaseException) -> str:
    """An error of the user's code in one line, with the place where it was raised."""
    ours = ("<frozen ", __file__, importlib.__file__)  # which say nothing of the user's code
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(ours)]
    where = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {str(error).strip()}{where}"
