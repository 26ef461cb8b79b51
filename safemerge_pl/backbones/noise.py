"""Inputs that no data went into: pictures of noise, and words at random."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["noise_images", "noise_like", "noise_tokens"]


def noise_images(count: int, size: Sequence[int], seed: int = 0) -> Tensor:
    """Draw pictures of noise, in which coarse structures are stronger than fine ones, as in photographs.

    Amplitudes fall with one over the frequency and colours go together; each picture has mean 0 and variance 1, as
    preprocessed images have on average.

    Args:
        count: how many.
        size: channels, height and width.
        seed: what is drawn depends on it alone, not on the state of torch's generators.

    Returns:
        ``(count, channels, height, width)``.

    Raises:
        ValueError: unless ``size`` is three numbers of at least 1, with more than one pixel.

    Example:
        >>> images = noise_images(2, (3, 8, 8))
        >>> images.shape, abs(images[0].mean().item()) < 1e-6, round(images[0].std().item(), 3)
        (torch.Size([2, 3, 8, 8]), True, 1.0)
    """
    if len(size) != 3 or min(size) < 1 or size[1] * size[2] < 2:
        raise ValueError(f"`size` must be channels, height and width, got {tuple(size)}.")
    channels, height, width = size
    white = torch.randn(count, channels, height, width, generator=torch.Generator().manual_seed(seed))
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.fftfreq(width)
    frequency = (rows.square() + columns.square()).sqrt().clamp_(min=1 / max(height, width))
    drawn: Tensor = torch.fft.ifft2(torch.fft.fft2(white) / frequency).real
    drawn = drawn + drawn.sum(1, keepdim=True)
    flat = drawn.flatten(1)
    return ((flat - flat.mean(1, keepdim=True)) / flat.std(1, keepdim=True)).view_as(drawn)


def noise_like(preprocess: Callable[[Sequence[Any]], Tensor], count: int) -> Tensor:
    """Draw pictures of noise of the size that a preprocessing makes of any picture.

    Args:
        preprocess: of PIL images.
        count: how many.
    """
    from PIL import Image

    return noise_images(count, preprocess([Image.new("RGB", (8, 8))]).shape[1:])


def noise_tokens(count: int, words: Sequence[int], length: int = 16, seed: int = 0) -> Tensor:
    """Draw words at random.

    Args:
        count: how many texts.
        words: the tokens to draw from.
        length: words of a text.
        seed: what is drawn depends on it alone.

    Returns:
        ``(count, length)``.

    Example:
        >>> noise_tokens(1, [7], length=3).tolist()
        [[7, 7, 7]]
    """
    drawn = torch.randint(len(words), (count, length), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(list(words))[drawn]
