"""Errors and warnings of torchcache.

::

    TorchcacheError (Exception)
     ├─ FingerprintError (TypeError)           a dataset that cannot be identified: pass ``key=``
     ├─ UnsupportedSampleError (TypeError)     a sample holds a type that cannot be stored exactly
     ├─ RandomSampleError (RuntimeError)       the source draws random numbers: caching would freeze them
     ├─ InPlaceWriteError (RuntimeError)       a transform wrote into a view of the cache (``copy=False``)
     ├─ StagingError (OSError)                 files could not be brought here from a remote store
     └─ StoreError (OSError)                   anything that is wrong with a store on disk
         ├─ StoreUnavailableError              cannot be opened or written here (permissions, space, locks)
         └─ StoreContentError (ValueError)     it can be read, and is not what it should be
             ├─ NotAStoreError                 the folder holds something else
             ├─ FormatVersionError             written by another version of the format
             ├─ CorruptStoreError              damaged: truncated, overwritten, or made to look like a store
             ├─ StoreMismatchError             a store of another dataset
             └─ StaleCacheError                the source gives other samples now than when they were cached

    TorchcacheWarning (UserWarning)
     ├─ CacheBypassWarning                     some samples come from the source each epoch; says why
     ├─ CacheFolderWarning                     the cache lies on a file system where it may be lost; says how
     └─ RandomSampleWarning                    as RandomSampleError, with ``on_random="warn"``

Every class can be built from one string, because that is how a DataLoader worker raises an error again in the
main process.
"""

from __future__ import annotations

__all__ = [
    "CacheBypassWarning",
    "CacheFolderWarning",
    "CorruptStoreError",
    "FingerprintError",
    "FormatVersionError",
    "InPlaceWriteError",
    "NotAStoreError",
    "RandomSampleError",
    "RandomSampleWarning",
    "StagingError",
    "StaleCacheError",
    "StoreContentError",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "TorchcacheError",
    "TorchcacheWarning",
    "UnsupportedSampleError",
]


class TorchcacheError(Exception):
    """Base class of every error that torchcache raises on its own account."""


class FingerprintError(TorchcacheError, TypeError):
    """The dataset holds something whose content cannot be identified; pass ``key=`` to name it yourself."""


class UnsupportedSampleError(TorchcacheError, TypeError):
    """A sample holds a type that cannot be stored and returned exactly; the message names the type and the place."""


class RandomSampleError(TorchcacheError, RuntimeError):
    """Producing a sample drew random numbers; a cache would freeze them. Move the random step to ``transform=``."""


class InPlaceWriteError(TorchcacheError, RuntimeError):
    """A transform wrote into a view of the cache, which the next epoch would see; use ``copy=True``."""


class StagingError(TorchcacheError, OSError):
    """Files could not be brought here from a remote store; what was fetched is kept for the next call."""


class StoreError(TorchcacheError, OSError):
    """Something is wrong with a store on disk."""


class StoreUnavailableError(StoreError):
    """The store cannot be opened or written here, though nothing says that it is damaged."""


class StoreContentError(StoreError, ValueError):
    """The store can be read, and is not what it should be."""


class NotAStoreError(StoreContentError):
    """The folder holds something that torchcache did not make."""


class FormatVersionError(StoreContentError):
    """The store was written by another version of the format."""


class CorruptStoreError(StoreContentError):
    """The store is damaged: shorter than it says, overwritten, or never what it claims to be."""


class StoreMismatchError(StoreContentError):
    """The store belongs to another dataset than the one in front of it."""


class StaleCacheError(StoreContentError):
    """A cached sample is no longer what the source gives; remove the store, or give the dataset another ``key=``."""


class TorchcacheWarning(UserWarning):
    """Base class of every warning that torchcache gives."""


class CacheBypassWarning(TorchcacheWarning):
    """Some samples are read from the source each epoch; the message says which, why, and what to do."""


class CacheFolderWarning(TorchcacheWarning):
    """The cache lies on a file system on which it works, and may be lost or slow; the message says which, and why."""


class RandomSampleWarning(TorchcacheWarning):
    """Producing a sample drew random numbers, which the cache freezes; given when ``on_random="warn"``."""
