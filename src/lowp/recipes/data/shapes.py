"""Drawn scenes: figures of ten kinds on crops of real photographs, with known kinds, boxes and masks.

They and the two photographs, included in scikit-learn, replace a data set if none is given: a network has to recognise
a figure of any colour, size and position on any background. The backgrounds of training and validation scenes are from
different parts of the photographs. The scenes are determined by a seed.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from lowp.compat import real_tensors
from lowp.errors import Unavailable
from lowp.recipes.data.images import LabelledImages


@functools.lru_cache(maxsize=1)
def photographs() -> tuple[Tensor, Tensor]:
    """Return a Chinese temple and a flower, uint8 [3, 427, 640] each.

    They are china.jpg and flower.jpg of sklearn.datasets (CC BY). Raises Unavailable without scikit-learn or Pillow.
    """
    try:
        from sklearn.datasets import load_sample_images

        images = load_sample_images().images
    except ImportError:
        raise Unavailable(
            "the photographs are embedded in scikit-learn and read by Pillow, and one of them is not installed: "
            "pip install 'lowp[recipes]'"
        ) from None
    with real_tensors():
        temple, flower = (torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous() for image in images)
    return temple, flower


Mask = npt.NDArray[np.bool_]
Grid = npt.NDArray[np.float64]

# The figures as conditions on u (to the right) and v (down), both -1 to 1 over the figure's box.
SHAPES: dict[str, Callable[[Grid, Grid], Mask]] = {
    "disc": lambda u, v: u * u + v * v < 1,
    "ring": lambda u, v: (u * u + v * v < 1) & (u * u + v * v > 0.35),
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 1,
    "frame": lambda u, v: np.maximum(abs(u), abs(v)) > 0.55,
    "diamond": lambda u, v: abs(u) + abs(v) < 1,
    "triangle": lambda u, v: 2 * abs(u) < v + 1,
    "plus": lambda u, v: np.minimum(abs(u), abs(v)) < 0.3,
    "saltire": lambda u, v: abs(abs(u) - abs(v)) < 0.35,
    "stripes": lambda u, v: (v * 2.5 + 3) % 1 < 0.5,
    "hourglass": lambda u, v: abs(u) < abs(v),
}

_COLOURS = 255.0 * np.array(
    [(1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0), (1, 0, 1), (0, 1, 1), (1, 1, 1), (0, 0, 0), (1, 0.5, 0), (0.5, 0, 1)]
)
_HELD_PART = 0.75  # validation backgrounds are to the right of this fraction of a photograph's width


class Scene(NamedTuple):
    """A drawn image: uint8 [3, side, side]; kinds [n]; boxes [n, 4] as left, top, right, bottom in pixels.

    `outline`: int64 [side, side], 0 for background, otherwise 1 + the kind of the topmost figure.
    """

    image: npt.NDArray[np.uint8]
    kinds: npt.NDArray[np.int64]
    boxes: npt.NDArray[np.float32]
    outline: npt.NDArray[np.int64]


def in_words(training: int, held: int) -> str:
    """Return a description of drawn training and validation sets of these sizes."""
    return f"figures drawn on scikit-learn's two photographs, {training:,} to train on and {held:,} held back"


def draw_scene(
    random: np.random.Generator,
    side: int,
    sizes: tuple[float, float],
    count: int,
    kinds: int,
    held: bool,
    coloured: bool = False,
) -> Scene:
    """Draw a scene with up to `count` figures of the first `kinds` kinds.

    `sizes`: range of a figure's sides as fractions of `side`. `coloured`: the colour of a figure varies around that of
    its kind, which makes it easier to learn; otherwise it is random. A figure whose overlap with an earlier one is more
    than a fifth of the smaller box is left out; there is always at least one figure.
    """
    image = _background(random, side, held)
    outline = np.zeros((side, side), np.int64)
    drawn: list[int] = []
    boxes: list[tuple[int, int, int, int]] = []
    for _ in range(count):
        kind = int(random.integers(kinds))
        width, height = (max(6, round(side * random.uniform(*sizes))) for _ in range(2))
        width = min(side, max(width, height * 2 // 3))
        height = min(side, max(height, width * 2 // 3))
        left, top = int(random.integers(side - width + 1)), int(random.integers(side - height + 1))
        box = (left, top, left + width, top + height)
        if any(_overlap(box, earlier) > 0.2 for earlier in boxes):
            continue
        _draw(random, image, outline, kind, box, coloured)
        drawn.append(kind)
        boxes.append(box)
    return Scene(image, np.asarray(drawn, np.int64), np.asarray(boxes, np.float32), outline)


def shape_images(side: int, training: int, held: int, kinds: int = 10, seed: int = 0) -> LabelledImages:
    """Draw images uint8 [N, 3, side, side] with one figure each, labelled by its kind."""
    parts: list[torch.Tensor] = []
    for size, is_held in ((training, False), (held, True)):
        random = np.random.default_rng([seed, is_held])
        scenes = [draw_scene(random, side, (0.4, 0.9), 1, kinds, is_held) for _ in range(size)]
        parts.append(torch.from_numpy(np.stack([scene.image for scene in scenes])))
        parts.append(torch.from_numpy(np.concatenate([scene.kinds for scene in scenes])))
    return LabelledImages(parts[0], parts[1], parts[2], parts[3], in_words(training, held))


def _background(random: np.random.Generator, side: int, held: bool) -> npt.NDArray[np.uint8]:
    """Return a random square crop of a photograph, subsampled by 2 if it is large enough, flipped at random."""
    photograph = photographs()[int(random.integers(2))].numpy()
    _, height, width = photograph.shape
    low, high = (int(width * _HELD_PART), width) if held else (0, int(width * _HELD_PART))
    step = 2 if 2 * side <= min(height, high - low) else 1
    while side * step > min(height, high - low):  # larger than the photograph: repeat its pixels
        photograph = photograph.repeat(2, axis=1).repeat(2, axis=2)
        height, low, high = 2 * height, 2 * low, 2 * high
    top = int(random.integers(height - side * step + 1))
    left = low + int(random.integers(high - low - side * step + 1))
    piece = photograph[:, top : top + side * step : step, left : left + side * step : step]
    return np.array(piece[:, :, ::-1] if random.random() < 0.5 else piece, order="C")


def _draw(
    random: np.random.Generator,
    image: npt.NDArray[np.uint8],
    outline: npt.NDArray[np.int64],
    kind: int,
    box: tuple[int, int, int, int],
    coloured: bool,
) -> None:
    """Draw a figure of one colour with noise into the image, and its kind into the outline."""
    left, top, right, bottom = box
    u = (np.arange(right - left) + 0.5) / (right - left) * 2 - 1
    v = (np.arange(bottom - top) + 0.5) / (bottom - top) * 2 - 1
    inside = tuple(SHAPES.values())[kind](*np.broadcast_arrays(u[None, :], v[:, None]))
    colour = _COLOURS[kind] + random.normal(0, 30, 3) if coloured else random.integers(0, 256, 3)
    pixels = colour[:, None, None] + random.normal(0, 12, (3, *inside.shape))
    image_part, outline_part = image[:, top:bottom, left:right], outline[top:bottom, left:right]
    image_part[:] = np.where(inside, pixels.clip(0, 255).astype(np.uint8), image_part)
    outline_part[:] = np.where(inside, kind + 1, outline_part)


def _overlap(box1: tuple[int, int, int, int], box2: tuple[int, int, int, int]) -> float:
    """Return the area of the intersection as a fraction of the smaller box."""
    width = min(box1[2], box2[2]) - max(box1[0], box2[0])
    height = min(box1[3], box2[3]) - max(box1[1], box2[1])
    areas = [(box[2] - box[0]) * (box[3] - box[1]) for box in (box1, box2)]
    return max(width, 0) * max(height, 0) / min(areas)
