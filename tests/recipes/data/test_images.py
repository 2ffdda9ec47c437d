"""Labelled images: generated ones are seeded and split, and only training images are augmented."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowp.errors import InvalidInput
from lowp.recipes.data.images import FolderExamples, ImageExamples, LabelledImages, image_data, mirrored, read_folders
from lowp.recipes.data.shapes import SHAPES, draw_scene, shape_images


def test_a_seed_decides_the_drawn_images() -> None:
    one, same, other = (shape_images(32, 20, 10, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.images, same.images) and not torch.equal(one.images, other.images)
    assert one.images.dtype == torch.uint8 and one.images.shape == (20, 3, 32, 32) and len(one.held_labels) == 10


def test_every_figure_fills_its_box_and_no_two_are_alike() -> None:
    axis = (np.arange(64) + 0.5) / 32 - 1
    masks = [shape(*np.meshgrid(axis, axis)) for shape in SHAPES.values()]
    for mask in masks:
        assert 0.2 < mask.mean() <= 1
        assert mask.any(0).mean() > 0.9 and mask.any(1).mean() >= 0.5
    differences = [(one ^ other).mean() for place, one in enumerate(masks) for other in masks[:place]]
    assert min(differences) > 0.1


@pytest.mark.parametrize("side", [16, 48, 700])
def test_a_scene_has_boxes_around_its_outlines(side: int) -> None:
    scene = draw_scene(np.random.default_rng(side), side, (0.2, 0.5), 6, kinds=8, held=False)
    assert scene.image.shape == (3, side, side) and 1 <= len(scene.kinds) <= 6
    assert (scene.boxes >= 0).all() and (scene.boxes <= side).all()
    inside = np.zeros((side, side), bool)
    for left, top, right, bottom in scene.boxes.astype(int):
        inside[top:bottom, left:right] = True
    assert not scene.outline[~inside].any() and set(np.unique(scene.outline)) - {0} <= {*(scene.kinds + 1)}


def test_figures_have_sides_within_the_range_and_none_is_longer_than_one_and_a_half_of_the_other() -> None:
    random = np.random.default_rng(0)
    scenes = [draw_scene(random, 60, (0.2, 0.9), 3, kinds=8, held=False) for _ in range(100)]
    left, top, right, bottom = np.concatenate([scene.boxes for scene in scenes]).T
    width, height = right - left, bottom - top
    assert min(width.min(), height.min()) == 12 and 50 < max(width.max(), height.max()) <= 54
    assert (width <= 1.5 * height + 1).all() and (height <= 1.5 * width + 1).all()  # whole pixels
    assert (width > 1.4 * height).any() and (height > 1.4 * width).any()


def test_images_are_standardised_by_the_training_set_and_only_it_is_augmented() -> None:
    data = image_data(shape_images(16, 50, 10), padding=2)
    everything = torch.arange(50)
    images, labels = data.training.batch(everything)
    assert images.mean().abs() < 1e-4 and images.std().sub(1).abs() < 0.01 and labels.dtype == torch.int64
    drawn = [data.training.batch(everything, torch.Generator().manual_seed(seed))[0] for seed in (0, 0, 1)]
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    held = data.validation.batch(torch.arange(10), torch.Generator())[0]
    assert torch.equal(held, data.validation.batch(torch.arange(10))[0])


def test_augmentation_shifts_by_up_to_the_padding_and_mirrors() -> None:
    image = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    image[0, 0, 2, 1] = 255
    one = ImageExamples(image, torch.zeros(1), torch.zeros(1), torch.ones(1), padding=1)
    places = set()
    for seed in range(200):
        batch, _ = one.batch(torch.tensor([0]), torch.Generator().manual_seed(seed))
        places |= {tuple(place) for place in batch[0, 0].nonzero().tolist()}
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 2, 3, 4)}


def test_a_draw_below_a_half_mirrors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "rand", lambda *size, generator: torch.tensor([0.4375, 0.5]))
    found, flipped = mirrored(torch.arange(4.0).view(2, 1, 1, 2), torch.Generator())
    assert flipped.tolist() == [True, False] and found.flatten().tolist() == [1, 0, 2, 3]


def test_a_channel_that_never_changes_does_not_divide_by_zero() -> None:
    same = torch.full((4, 1, 2, 2), 7, dtype=torch.uint8)
    data = image_data(LabelledImages(same, torch.zeros(4), same, torch.zeros(4), ""))
    assert not data.training.batch(torch.arange(4))[0].any()


def write_folders(folder: Path, classes: int = 2) -> None:
    for part in ("train", "val"):
        for label in range(classes):
            (folder / part / f"n{label}").mkdir(parents=True)
            for number in range(2):
                pixels = np.full((30, 40 + number, 3), 100 * label, np.uint8)
                Image.fromarray(pixels).save(folder / part / f"n{label}" / f"{number}.png")


def test_pictures_in_folders_are_cut_to_the_side_with_the_folder_as_their_class(tmp_path: Path) -> None:
    write_folders(tmp_path)
    data = read_folders(tmp_path, side=16, classes=10)
    images, labels = data.training.batch(torch.arange(4), torch.Generator().manual_seed(0))
    assert images.shape == (4, 3, 16, 16) and labels.tolist() == [0, 0, 1, 1]
    assert images[0, 0, 0, 0] == pytest.approx(-123.675 / 58.395)
    assert len(data.validation) == 4


@pytest.mark.parametrize(("width", "height"), [(60, 40), (40, 60)])
def test_the_middle_of_a_picture_is_seen_where_nothing_is_drawn_by_chance(
    width: int, height: int, tmp_path: Path
) -> None:
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[height // 2 - 3 : height // 2 + 3, width // 2 - 3 : width // 2 + 3] = 255
    for part in ("train", "val"):
        (tmp_path / part / "one").mkdir(parents=True)
        Image.fromarray(pixels).save(tmp_path / part / "one" / "0.png")
    data = read_folders(tmp_path, side=35, classes=1)  # the shorter side is 40 pixels
    (seen,), _ = data.validation.batch(torch.arange(1))
    rows, columns = torch.nonzero(seen[0] > 0, as_tuple=True)
    assert {*rows.tolist()} == {*columns.tolist()} == {*range(15, 21)}
    drawn = [data.training.batch(torch.arange(1), torch.Generator().manual_seed(seed))[0][0, 0] for seed in range(40)]
    corners = [tuple(int(one.min()) for one in torch.nonzero(image > 0, as_tuple=True)) for image in drawn]
    tops, lefts = ({one for one in ones} for ones in zip(*corners, strict=True))
    assert len(tops) > 3 and len(lefts) > 3
    assert (tops if height == 40 else lefts) == {*range(12, 18)}  # of 40 pixels any 35


@pytest.mark.parametrize(("drawn", "is_flipped"), [(0.4375, True), (0.5, False)])
def test_a_picture_is_flipped_by_a_draw_below_a_half(
    drawn: float, is_flipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(np.arange(40, dtype=np.uint8)[None, :, None].repeat(40, 0).repeat(3, 2)).save(tmp_path / "a.png")
    monkeypatch.setattr(torch, "rand", lambda size, generator: torch.tensor(drawn))
    (image,), _ = FolderExamples([(tmp_path / "a.png", 0)], 35).batch(torch.tensor([0]), torch.Generator())
    assert (image[0, 0, 0] > image[0, 0, -1]) == is_flipped


def test_folders_without_a_class_are_refused(tmp_path: Path) -> None:
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
    with pytest.raises(InvalidInput, match=r"has 0 classes .*: this size of the network takes 1 to 10"):
        read_folders(tmp_path, side=16, classes=10)


def test_folders_with_too_many_classes_or_broken_pictures_are_refused(tmp_path: Path) -> None:
    write_folders(tmp_path)
    with pytest.raises(InvalidInput, match=r"has 2 classes .*: this size of the network takes 1 to 1"):
        read_folders(tmp_path, side=16, classes=1)
    (tmp_path / "train" / "n0" / "0.png").write_bytes(b"no picture")
    data = read_folders(tmp_path, side=16, classes=10)
    with pytest.raises(InvalidInput, match=r"0\.png cannot be read as a picture"):
        data.training.batch(torch.tensor([0]))
    with pytest.raises(InvalidInput, match=r"looked for train in .*nowhere; it is not there"):
        read_folders(tmp_path / "nowhere", side=16, classes=10)
