"""From images to what a Vision Transformer reads: resized, normalised, augmented, mixed, on the device.

A crop, a flip and an antialiased resize are linear along each side of an image, so all of a batch is two
batched matrix products. Output pixel i of n looks at position c_i of the input, weighted by a triangle:

    out = Y @ image @ X^T                               image (h, w), Y (n, h), X (n, w)
    Y[i, j] ~ max(0, 1 - |j + 1/2 - c_i| / max(scale, 1)),  c_i = top + (i + 1/2) scale,  scale = height / n

Rows of Y and X sum to 1, and a flip mirrors the rows of X. This is what torchvision's `resize` does with
antialias=True, here with another crop for every image.

Randomness belongs to a sample, not to a rank: its crop and its weight in mixup are drawn from (seed, epoch,
sample), its mixup partner from the batch of all ranks. A sample looks the same whichever rank gets it. This
also holds for a transform of torchvision:

    from torchvision.transforms import v2
    cifar = v2.Compose([v2.RandomCrop(32, padding=4), v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10)])
    ImageTransform(32, augment=cifar)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hpnb.data.dataset import Batch, Item
from hpnb.data.distributed_sampler import BatchSamples

VIT = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))  # what google/vit-* were trained with


@dataclass(frozen=True)
class ImageTransform:
    """What happens to a batch of images after it was loaded; pass it to `Loader(transform=...)`.

    Args:
        size: side of the result, in pixels.
        augment: True crops a random part (30 to 100 % of the area, sides 3:4 to 4:3), and mirrors half of the
            images. Or a transform of torchvision: it is called with one image (3, h, w) at a time, uint8, and
            returns images of one size. What it draws from PyTorch's generator follows from the sample.
        mixup: alpha of mixup (Zhang et al. 2018, arXiv 1710.09412); 0 mixes nothing. A sample is blended with
            another one of the global batch, lambda ~ Beta(alpha, alpha), and labels become probabilities
            (B, classes). transformers takes float labels for a multi-label problem, so compute the loss
            yourself: torch.nn.functional.cross_entropy(logits, labels).
        classes: how many there are; needed for mixup.
        mean, std: of each channel, on the scale 0 to 1.
        device: where the transform runs and the batch ends up; None leaves it where it is.

    Raises:
        ValueError: mixup below 0, or above 0 without `classes`.
    """

    size: int
    augment: bool | Callable[[torch.Tensor], torch.Tensor] = False
    mixup: float = 0.0
    classes: int | None = None
    mean: tuple[float, float, float] = VIT[0]
    std: tuple[float, float, float] = VIT[1]
    device: torch.device | str | None = None

    def __post_init__(self) -> None:
        if self.mixup < 0 or (self.mixup and not self.classes):
            raise ValueError(
                f"mixup={self.mixup} with classes={self.classes} mixes nothing; "
                "use 0, or a positive alpha and the number of classes"
            )

    @property
    def partners(self) -> bool:
        """Whether the loader must also bring the samples to mix with."""
        return self.mixup > 0

    def collate(self, items: Sequence[Item]) -> Batch:
        return stack_images(items)

    def __call__(self, batch: Batch, samples: BatchSamples) -> Batch:
        """{"pixel_values" (B, 3, size, size) float32, "labels" (B,) int64 or (B, classes) float32}."""
        images, labels = batch["pixel_values"].to(self.device), batch["labels"].to(self.device)
        rngs = [np.random.default_rng([samples.seed, samples.epoch, sample]) for sample in samples.samples]
        boxes = None
        if callable(self.augment):
            images = _augment_each(images, self.augment, rngs)
        elif self.augment:
            boxes = [_random_crop(rng, *images.shape[-2:]) for rng in rngs]
        pixels = image_batch(images, self.size, boxes, self.mean, self.std)
        if not self.partners:
            return {"pixel_values": pixels, "labels": labels}
        assert self.classes is not None
        batch_size = len(samples.partners)
        lambdas = [rng.beta(self.mixup, self.mixup) for rng in rngs[:batch_size]]
        weight = torch.tensor(lambdas, dtype=pixels.dtype, device=pixels.device)[:, None]  # (B, 1)
        partners = torch.tensor(samples.partners, dtype=torch.long, device=pixels.device)
        soft = torch.nn.functional.one_hot(labels, self.classes).to(pixels.dtype)
        return {
            "pixel_values": torch.lerp(pixels[partners], pixels[:batch_size], weight[..., None, None]),
            "labels": torch.lerp(soft[partners], soft[:batch_size], weight),
        }


Box = tuple[float, float, float, float, bool]  # top, left, height, width in pixels; mirrored


def image_batch(
    images: torch.Tensor,
    size: int,
    boxes: Sequence[Box] | None = None,
    mean: Sequence[float] = VIT[0],
    std: Sequence[float] = VIT[1],
) -> torch.Tensor:
    """Crop `boxes` from the images, resize them and normalise.

    Args:
        images: (B, 3, h, w), uint8, or floats on the scale 0 to 1.
        boxes: one per image; None crops nothing.

    Returns:
        (B, 3, size, size) float32, on the device of `images`.
    """
    pixels = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    height, width = pixels.shape[-2:]
    if boxes is not None or (height, width) != (size, size):
        uncropped: Box = (0, 0, height, width, False)
        crops = torch.tensor(boxes if boxes is not None else [uncropped] * len(pixels), dtype=pixels.dtype)
        top, left, tall, wide, mirrored = crops.to(pixels.device).reshape(-1, 5).unbind(1)
        rows = _resize_weights(top, tall, height, size)[:, None]  # (B, 1, size, h)
        columns = _resize_weights(left, wide, width, size, mirrored)[:, None]  # (B, 1, size, w)
        pixels = rows @ pixels @ columns.mT
    shift, scale = (torch.tensor(list(x), device=pixels.device)[:, None, None] for x in (mean, std))
    return (pixels - shift) / scale


def _resize_weights(
    start: torch.Tensor, length: torch.Tensor, side: int, size: int, mirrored: torch.Tensor | None = None
) -> torch.Tensor:
    """(B, size, side): the weight of every input pixel in every output pixel, along one side."""
    scale = (length / size)[:, None, None]
    steps = torch.arange(size, dtype=start.dtype, device=start.device).expand(len(start), size)
    if mirrored is not None:
        steps = torch.where(mirrored[:, None] > 0, size - 1 - steps, steps)
    begin, inputs = start[:, None, None], torch.arange(side, dtype=start.dtype, device=start.device) + 0.5
    centres = begin + (steps[..., None] + 0.5) * scale
    weights = (1 - (inputs - centres).abs() / scale.clamp(min=1)).clamp(min=0)
    inside = (inputs > begin) & (inputs < begin + length[:, None, None])  # nothing from outside the box
    weights = weights * inside
    return weights / weights.sum(-1, keepdim=True)


def _random_crop(rng: np.random.Generator, height: int, width: int) -> Box:
    """A random box within (height, width). It always draws five numbers: later ones do not depend on it."""
    area, ratio, down, right, mirror = rng.random(5)
    share = 0.3 + 0.7 * area
    stretch = np.exp((2 * ratio - 1) * np.log(4 / 3) / 2)
    tall = max(1, round(min(1.0, share**0.5 * stretch) * height))
    wide = max(1, round(min(1.0, share**0.5 / stretch) * width))
    return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide, bool(mirror < 0.5)


def _augment_each(
    images: torch.Tensor,
    augment: Callable[[torch.Tensor], torch.Tensor],
    rngs: Sequence[np.random.Generator],
) -> torch.Tensor:
    """(B, 3, h, w): `augment` of every image, each with random numbers of its own."""
    augmented = []
    with torch.random.fork_rng(devices=[]):
        for image, rng in zip(images, rngs, strict=True):
            torch.default_generator.manual_seed(int(rng.integers(2**63)))  # torch.manual_seed seeds GPUs too
            augmented.append(augment(image))
    return torch.stack(augmented) if augmented else images


# --- from items to a batch --------------------------------------------------------------------


def stack_images(items: Sequence[Item]) -> Batch:
    """{"pixel_values" (B, 3, h, w) uint8, "labels" (B,) int64}: a quarter of the bytes to send to a device.

    Raises:
        ValueError: the images differ in size or channels.
    """
    images = [np.asarray(_field(item, "image", "img")) for item in items]
    if len({image.shape for image in images}) > 1:
        sizes = sorted({f"{image.shape[1]} x {image.shape[0]}" for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f"images of {' and '.join(sizes)} pixels cannot be in one batch; load them with image_size="
            )
        shapes = " and ".join(sorted({str(image.shape) for image in images}))
        raise ValueError(
            f"images of shapes {shapes} cannot be in one batch; image.convert('RGB') gives each 3 channels"
        )
    pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2)
    return {"pixel_values": pixels, "labels": _labels(items)}


def collate_images(items: Sequence[Item], processor: Any = None) -> Batch:
    """{"pixel_values" (B, 3, w, w) float32, normalised for ViT, "labels" (B,) int64}, without augmentation.

    A ViT takes square images: those of another height are stretched or shrunk to their width w.

    Args:
        processor: of transformers, such as ViTImageProcessor.from_pretrained(...), which then resizes and
            normalises, and takes images of any size: collate_fn=partial(collate_images, processor=processor).
    """
    if processor is not None:
        images = [_field(item, "image", "img") for item in items]
        pixels = processor(images, return_tensors="pt")["pixel_values"]
        return {"pixel_values": pixels, "labels": _labels(items)}
    batch = stack_images(items)
    return batch | {"pixel_values": image_batch(batch["pixel_values"], batch["pixel_values"].size(-1))}


def _labels(items: Sequence[Item]) -> torch.Tensor:
    return torch.tensor([_field(item, "labels", "label") for item in items])


def _field(item: Item, *names: str) -> Any:
    for name in names:
        if name in item:
            return item[name]
    there = ", ".join(map(repr, item)) or "no field"
    raise KeyError(
        f"a sample has {there}, and {' or '.join(map(repr, names))} is needed; rename the column, or pass a "
        "collate_fn that reads it"
    )
