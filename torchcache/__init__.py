"""torchcache: a dataset cache on the node's own disk, for PyTorch."""

from torchcache._version import __version__
from torchcache.dataset import CachedDataset, Stats
from torchcache.encode import register
from torchcache.errors import (
    CacheBypassWarning,
    CacheFolderWarning,
    CorruptStoreError,
    FingerprintError,
    FormatVersionError,
    InPlaceWriteError,
    NotAStoreError,
    RandomSampleError,
    RandomSampleWarning,
    StagingError,
    StaleCacheError,
    StoreContentError,
    StoreError,
    StoreMismatchError,
    StoreUnavailableError,
    TorchcacheError,
    TorchcacheWarning,
    UnsupportedSampleError,
)
from torchcache.fingerprint import Fingerprint, fingerprint
from torchcache.loader import DataLoader
from torchcache.scalars import log_stats
from torchcache.split import split_transform
from torchcache.staging import stage

__all__ = [
    "CacheBypassWarning",
    "CacheFolderWarning",
    "CachedDataset",
    "CorruptStoreError",
    "DataLoader",
    "Fingerprint",
    "FingerprintError",
    "FormatVersionError",
    "InPlaceWriteError",
    "NotAStoreError",
    "RandomSampleError",
    "RandomSampleWarning",
    "StagingError",
    "StaleCacheError",
    "Stats",
    "StoreContentError",
    "StoreError",
    "StoreMismatchError",
    "StoreUnavailableError",
    "TorchcacheError",
    "TorchcacheWarning",
    "UnsupportedSampleError",
    "__version__",
    "fingerprint",
    "log_stats",
    "register",
    "split_transform",
    "stage",
]
