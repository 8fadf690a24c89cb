"""A Hugging Face ``datasets.Dataset`` behind the cache: decoding and formatting run once, not once an epoch.

python examples/hugging_face_datasets.py [--samples 256]      (pip install datasets)
"""

from __future__ import annotations

import argparse

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader

from torchcache import CachedDataset

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--samples", type=int, default=256)
arguments = parser.parse_args()

# In place of datasets.load_dataset(...), so that nothing is downloaded.
rows = datasets.Dataset.from_dict(
    {
        "image": [np.full((28, 28), i % 256, np.uint8).tolist() for i in range(arguments.samples)],
        "label": [i % 10 for i in range(arguments.samples)],
    }
).with_format("torch")

train = CachedDataset(rows)  # rows are dicts, so batches are dicts of tensors
loader = DataLoader(train, batch_size=32, shuffle=True)
for epoch in range(3):
    labels = torch.cat([batch["label"] for batch in loader])
    print(f"epoch {epoch}: {len(labels)} rows, {train.stats.source_reads} read from the source in all")
batch = next(iter(loader))
print({name: (tuple(column.shape), str(column.dtype)) for name, column in batch.items()})
print(f"its columns, through the cache: {train.column_names}")
