"""Pictures with masks: generated ones have every class, and folders are matched by name and checked."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image

from lowp.errors import InvalidInput
from lowp.recipes.data.shapes import Scene, draw_scene
from lowp.recipes.unet import MaskedExamples, drawn_masks, evaluate, read_masked


def write(folder: Path, values: tuple[int, ...] = (0, 40, 200), masks: str = "masks") -> None:
    (folder / "images").mkdir(parents=True)
    (folder / masks).mkdir()
    for number in range(5):
        Image.fromarray(np.full((20, 30, 3), 51 * number, np.uint8)).save(folder / "images" / f"{number}.png")
        mask = np.resize(np.asarray(values, np.uint8).repeat(10), (20, 30))
        Image.fromarray(mask).save(folder / masks / f"{number}.png")


@pytest.mark.parametrize("masks", ["masks", "labels"])
def test_grey_values_are_classes_in_their_order_and_are_never_blended(masks: str, tmp_path: Path) -> None:
    write(tmp_path, masks=masks)
    data = read_masked(tmp_path, side=12, border=4, classes=3)
    images, found = data.training.batch(torch.arange(4))
    assert images.shape == (4, 3, 20, 20) and found.shape == (4, 12, 12)
    assert found[0, 0].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert images[0, 0, 0, 0] == pytest.approx(51 / 127.5 - 1)
    assert len(data.validation) == 1


def test_missing_or_too_many_classes_and_broken_masks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput, match=r"pictures with masks: looked for images or JPEGImages in .*; it holds nothing"
    ):
        read_masked(tmp_path, 12, 4, 9)
    write(tmp_path)
    with pytest.raises(InvalidInput, match="has 3 values in its masks, but the network has 2 classes"):
        read_masked(tmp_path, 12, 4, 2)
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(tmp_path / "masks" / "3.png")
    with pytest.raises(InvalidInput, match=r"3\.png has 3 values a pixel"):
        read_masked(tmp_path, 12, 4, 9)
    (tmp_path / "masks" / "3.png").write_bytes(b"none")
    with pytest.raises(InvalidInput, match=r"3\.png cannot be read as a picture"):
        read_masked(tmp_path, 12, 4, 9)
    (tmp_path / "masks" / "3.png").unlink()
    with pytest.raises(InvalidInput, match=r"looked for 3\.png in .*masks"):
        read_masked(tmp_path, 12, 4, 9)


def test_drawn_pictures_show_every_class_and_are_seeded() -> None:
    one, same = (drawn_masks(68, 46, 9, 30, 5) for _ in range(2))
    images, masks = one.training.batch(torch.arange(30))
    assert images.shape == (30, 3, 160, 160) and images.abs().max() <= 1
    assert masks.unique().tolist() == list(range(9))
    assert torch.equal(images, same.training.batch(torch.arange(30))[0])


def test_a_drawn_picture_has_three_to_six_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def scene(random: np.random.Generator, side: int, sizes: tuple[float, float], count: int, *rest: Any) -> Scene:
        asked.append(count)
        return draw_scene(random, side, sizes, count, *rest)

    monkeypatch.setattr("lowp.recipes.unet.draw_scene", scene)
    drawn_masks(68, 46, 9, 40, 5)
    assert len(asked) == 45 and set(asked) == {3, 4, 5, 6}


def test_a_mask_is_mirrored_with_its_picture() -> None:
    masks = torch.randint(0, 2, (6, 8, 8), generator=torch.Generator().manual_seed(0))
    images = (masks * 255)[:, None].expand(-1, 3, -1, -1).to(torch.uint8)
    drawn, drawn_labels = MaskedExamples(images, masks, 2).batch(torch.arange(6), torch.Generator().manual_seed(0))
    assert torch.equal(drawn[:, 0, 2:-2, 2:-2] > 0, drawn_labels > 0)
    assert not torch.equal(drawn_labels, masks)


def test_a_drawn_picture_is_coloured_by_its_kinds_on_its_part_of_the_photographs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []

    def scene(random: np.random.Generator, side: int, sizes: Any, count: int, *rest: Any) -> Scene:
        asked.append((side, sizes, *rest))
        return draw_scene(random, side, sizes, count, *rest)

    monkeypatch.setattr("lowp.recipes.unet.draw_scene", scene)
    drawn = drawn_masks(68, 46, 9, 3, 2)
    assert asked == [(68, (0.25, 0.5), 8, False, True)] * 3 + [(68, (0.25, 0.5), 8, True, True)] * 2
    assert (len(drawn.training), len(drawn.validation)) == (3, 2)


def test_pixels_and_classes_are_counted_over_all_pictures() -> None:
    def batch(masks: list[Any], found: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        return 2.0 * torch.nn.functional.one_hot(torch.tensor(found), 9).movedim(-1, 1), torch.tensor(masks)

    nothing = [[[0, 0], [0, 0]]] * 3
    batches = [batch([[[0, 1], [1, 2]]], [[[0, 1], [2, 2]]]), batch(nothing, nothing)]
    found = evaluate(cast(torch.nn.Module, lambda images: images), batches)
    right = math.log(math.exp(2) + 8) - 2
    assert found["accuracy"] == pytest.approx(15 / 16) and found["mean_overlap"] == pytest.approx((1 + 0.5 + 0.5) / 3)
    assert found["loss"] == pytest.approx(right + 2 * 0.25 / 4)
