"""Beans, CIFAR-10 and MRPC, or generated stand-ins for them, and a loader for every layout.

    train = hpnb.data.beans("train", image_size=64)
    print(train.describe())                                       # real, or generated and why
    loader = hpnb.data.Loader(train, 32, mesh.dp, seed=0,         # 32 samples a data-parallel rank
                              transform=hpnb.data.ImageTransform(64, augment=True))
    for epoch in range(3):
        loader.set_epoch(epoch)
        for batch in loader: ...                                  # {"pixel_values", "labels"}
"""

from hpnb.data.dataset import Dataset, Source
from hpnb.data.deal import Deal, Where
from hpnb.data.images import ImageTransform, collate_images, image_batch
from hpnb.data.loader import Loader
from hpnb.data.sets import beans, cifar10, mrpc
from hpnb.data.text import byte_tokenizer, collate_pairs

__all__ = [
    "Dataset",
    "Deal",
    "ImageTransform",
    "Loader",
    "Source",
    "Where",
    "beans",
    "byte_tokenizer",
    "cifar10",
    "collate_images",
    "collate_pairs",
    "image_batch",
    "mrpc",
]
