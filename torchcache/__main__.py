"""``python -m torchcache``."""

from torchcache.cli import main

main()
