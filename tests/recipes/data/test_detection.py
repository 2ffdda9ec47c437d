"""Pascal VOC's layout is read from a folder and from a zip file; missing or broken files are named."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lowp.errors import InvalidInput
from lowp.recipes.data.detection import VOC_CLASSES, draw_boxes, read_voc, truths_of


def annotation(*objects: tuple[str, int, int, int, int, int]) -> str:
    nodes = "".join(
        f"<object><name>{name}</name><difficult>{difficult}</difficult><bndbox><xmin>{left}</xmin><ymin>{top}</ymin>"
        f"<xmax>{right}</xmax><ymax>{bottom}</ymax></bndbox></object>"
        for name, left, top, right, bottom, difficult in objects
    )
    return f"<annotation><size><width>40</width><height>20</height></size>{nodes}</annotation>"


def jpeg() -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.full((20, 40, 3), 128, np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


FILES: dict[str, bytes] = {
    "ImageSets/Main/trainval.txt": b"000001\n000002\n",
    "ImageSets/Main/test.txt": b"000003\n",
    "Annotations/000001.xml": annotation(("dog", 1, 1, 20, 20, 0), ("cat", 21, 11, 40, 20, 1)).encode(),
    "Annotations/000002.xml": annotation().encode(),
    "Annotations/000003.xml": annotation(("dog", 1, 1, 40, 20, 0)).encode(),
    **{f"JPEGImages/00000{number}.jpg": jpeg() for number in (1, 2, 3)},
}


def write(path: Path, packed: bool = False, **changed: bytes | None) -> Path:
    files = {**FILES, **{name.replace("__", "/").replace("_dot_", "."): content for name, content in changed.items()}}
    kept = {name: content for name, content in files.items() if content is not None}
    if packed:
        with zipfile.ZipFile(path / "my_VOC.zip", "w") as archive:
            for name, content in kept.items():
                archive.writestr(f"VOCdevkit/VOC2007/{name}", content)
        return path
    for name, content in kept.items():
        (path / "VOC2007" / name).parent.mkdir(parents=True, exist_ok=True)
        (path / "VOC2007" / name).write_bytes(content)
    return path


@pytest.mark.parametrize("packed", [False, True])
def test_pictures_and_boxes_are_read_from_a_folder_and_a_zip_file(packed: bool, tmp_path: Path) -> None:
    data = read_voc(write(tmp_path, packed), side=16, classes=20)
    batch = data.training.batch(torch.tensor([0, 1]))
    assert batch["images"].shape == (2, 3, 16, 16)
    assert batch["classes"].tolist() == [[VOC_CLASSES.index("dog"), VOC_CLASSES.index("cat")], [-1, -1]]
    assert batch["boxes"][0].tolist() == [[0.0, 0.0, 0.5, 1.0], [0.5, 0.5, 1.0, 1.0]]
    assert batch["difficult"].tolist() == [[False, True], [False, False]]
    shown = truths_of(batch, scale=2.0)
    assert shown[0].boxes[0].tolist() == [0.0, 0.0, 1.0, 2.0] and len(shown[1].boxes) == 0
    assert "2 classes from" in data.description and data.description.endswith("2 pictures to train on and 1 held back")


def test_other_classes_than_vocs_are_numbered_in_their_order(tmp_path: Path) -> None:
    other = {"Annotations__000003_dot_xml": annotation(("WBC", 1, 1, 40, 20, 0)).encode()}
    data = read_voc(write(tmp_path, **other), side=16, classes=20)
    assert data.validation.batch(torch.tensor([0]))["classes"].tolist() == [[0]]


def test_boxes_are_mirrored_with_their_picture(tmp_path: Path) -> None:
    data = read_voc(write(tmp_path), side=16, classes=20)
    found = {
        tuple(data.training.batch(torch.tensor([0]), torch.Generator().manual_seed(seed))["boxes"][0, 0].tolist())
        for seed in range(10)
    }
    assert found == {(0.0, 0.0, 0.5, 1.0), (0.5, 0.0, 1.0, 1.0)}


def test_each_picture_of_a_batch_is_mirrored_or_not_with_all_its_boxes() -> None:
    examples, every = draw_boxes(48, 10, 40, 10).training, torch.arange(40)
    plain, batch = examples.batch(every), examples.batch(every, torch.Generator().manual_seed(0))
    turned = [torch.equal(a.flip(-1), b) for a, b in zip(plain["images"], batch["images"], strict=True)]
    assert 10 < sum(turned) < 30
    for was_turned, *images, before, after, kind in zip(
        turned, plain["images"], batch["images"], plain["boxes"], batch["boxes"], plain["classes"], strict=True
    ):
        assert was_turned or torch.equal(*images)
        for (left, top, right, bottom), box in zip(before[kind >= 0], after[kind >= 0], strict=True):
            assert box.tolist() == [1 - right, top, 1 - left, bottom] if was_turned else [left, top, right, bottom]


BROKEN: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no picture": ({"JPEGImages__000001_dot_jpg": None}, r"looked for JPEGImages/000001\.jpg in"),
    "bad picture": ({"JPEGImages__000001_dot_jpg": b"none"}, r"000001\.jpg cannot be read as a picture"),
    "no set": ({"ImageSets__Main__test_dot_txt": None}, r"looked for ImageSets/Main/test\.txt or ImageSets/Main/val"),
    "empty set": ({"ImageSets__Main__test_dot_txt": b"\n"}, r"has no pictures in ImageSets/Main/test\.txt"),
    "bad xml": ({"Annotations__000001_dot_xml": b"<annotation>"}, "an annotation of 000001 that cannot be read"),
    "no number": (
        {"Annotations__000001_dot_xml": FILES["Annotations/000001.xml"].replace(b"<xmin>1<", b"<xmin>x<")},
        "an annotation of 000001 that cannot be read: could not convert",
    ),
    "empty box": ({"Annotations__000001_dot_xml": annotation(("dog", 9, 1, 5, 20, 0)).encode()}, "an empty box"),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_missing_or_broken_is_named(packed: bool, case: str, tmp_path: Path) -> None:
    changed, text = BROKEN[case]
    with pytest.raises(InvalidInput, match=rf"Pascal VOC: .*{text}.* Get it .*from http"):
        read_voc(write(tmp_path, packed, **changed), side=16, classes=20)


def test_too_many_classes_no_set_and_no_zip_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"looked for ImageSets or \*VOC\*\.zip or .*; it holds nothing"):
        read_voc(tmp_path, 16, 20)
    (tmp_path / "VOC.zip").write_bytes(b"none")
    with pytest.raises(InvalidInput, match=r"VOC\.zip is not a zip file"):
        read_voc(tmp_path, 16, 20)
    (tmp_path / "VOC.zip").unlink()
    with pytest.raises(InvalidInput, match="has 2 classes, but this size of the network has 1"):
        read_voc(write(tmp_path), 16, 1)


def test_drawn_scenes_have_one_to_four_boxes_within_the_picture() -> None:
    data = draw_boxes(48, 10, 40, 10)
    batch = data.training.batch(torch.arange(40))
    counts = (batch["classes"] >= 0).sum(1)
    assert counts.min() == 1 and 2 <= counts.max() <= 4
    assert batch["boxes"].min() >= 0 and batch["boxes"].max() <= 1
    assert torch.equal(batch["images"], draw_boxes(48, 10, 40, 10).training.batch(torch.arange(40))["images"])
