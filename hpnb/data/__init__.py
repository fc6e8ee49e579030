"""Beans, CIFAR-10, MRPC and text, or generated stand-ins for them, and a loader for every layout.

train = hpnb.data.beans("train", image_size=64)
print(train.describe())                                       # real, or generated and why
loader = hpnb.data.Loader(train, 32, mesh.dp, seed=0,         # 32 samples a data-parallel rank
                          transform=hpnb.data.ImageTransform(64, augment=True))
for epoch in range(3):
    loader.set_epoch(epoch)
    for batch in loader: ...                                  # {"pixel_values", "labels"}

hpnb.data.image_folder("pets", "train", image_size=64)        # pets/train/cat/1.jpg: images of your own
hpnb.data.text("train", block=128)                            # sequences of tokens, of real English
"""

from hpnb.data.beans_cifar10_mrpc import beans, cifar10, mrpc
from hpnb.data.dataset import Dataset, Source
from hpnb.data.distributed_sampler import BatchSamples, DistributedBatchSampler
from hpnb.data.image_folder import image_folder
from hpnb.data.images import ImageTransform, collate_images, image_batch
from hpnb.data.iterable_loader import IterableLoader
from hpnb.data.loader import Loader
from hpnb.data.text_dataset import TextDataset, text
from hpnb.data.tokenizer import bpe_tokenizer, byte_tokenizer, collate_pairs, collate_texts, train_merges

__all__ = [
    "BatchSamples",
    "Dataset",
    "DistributedBatchSampler",
    "ImageTransform",
    "IterableLoader",
    "Loader",
    "Source",
    "TextDataset",
    "beans",
    "bpe_tokenizer",
    "byte_tokenizer",
    "cifar10",
    "collate_images",
    "collate_pairs",
    "collate_texts",
    "image_batch",
    "image_folder",
    "mrpc",
    "text",
    "train_merges",
]
