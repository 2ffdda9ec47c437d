"""What is verified of an archive is what is read of it: no bit of its framing changes a number."""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp.checkpoint import InvalidCheckpoint, check_archive
from lowp.portable import convert


def _model() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def _loaded(path: Path) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    lowp.load(path, model=model)
    return model.state_dict()


def _torch_file(folder: Path) -> Path:
    torch.save(_model().state_dict(), folder / "plain.pt")
    return folder / "plain.pt"


def _run(folder: Path) -> Path:
    lowp.save(folder / "run.pt", model=_model())
    return folder / "run.pt"


def _packed(folder: Path) -> Path:
    convert(_torch_file(folder), folder / "packed.pt", "int8")
    return folder / "packed.pt"


_KINDS: dict[str, tuple[Callable[[Path], Path], Callable[[Path], dict[str, Any]]]] = {
    "of a run": (_run, _loaded),
    "of torch": (_torch_file, lowp.load),
    "converted": (_packed, lowp.load),
}


def _framing(data: bytes) -> Iterator[int]:
    """Yield the places of the local headers, without their padding, of the directory and of its end."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        ends = [*(one.header_offset for one in archive.infolist()[1:]), archive.start_dir]
        for one, end in zip(archive.infolist(), ends, strict=True):
            name, padding = (int.from_bytes(data[one.header_offset + at :][:2], "little") for at in (26, 28))
            payload = one.header_offset + 30 + name + padding
            yield from range(one.header_offset, payload - padding + 4)
            yield from range(payload + one.file_size, end)
        yield from range(archive.start_dir, len(data))


def _flipped(data: bytes, bit: int) -> bytes:
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    return bytes(flipped)


def _same(found: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return list(found) == list(wanted) and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("every", [97, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", _KINDS)
def test_a_flipped_bit_of_the_framing_is_refused_or_changes_no_number(tmp_path: Path, kind: str, every: int) -> None:
    write, read = _KINDS[kind]
    path = write(tmp_path)
    data, wanted = path.read_bytes(), read(path)
    bits = [8 * place + bit for place in _framing(data) for bit in range(8)][::every]
    refused = 0
    for bit in bits:
        path.write_bytes(_flipped(data, bit))
        try:
            assert _same(read(path), wanted), bit
        except InvalidCheckpoint:
            refused += 1
    assert len(bits) / 2 < refused < len(bits)


def test_no_bit_of_the_directory_makes_torch_read_what_was_not_verified(tmp_path: Path) -> None:
    data = _torch_file(tmp_path).read_bytes()
    wanted, begins = torch.load(io.BytesIO(data), weights_only=True), data.index(b"PK\1\2")
    read = 0
    for bit in range(8 * begins, 8 * len(data)):
        file = io.BytesIO(_flipped(data, bit))
        try:
            check_archive(file)
            file.seek(0)
            found = torch.load(file, weights_only=True)
        except Exception:  # of any type: `read` and `read_torch` make an InvalidCheckpoint of it
            continue
        assert _same(found, wanted), bit
        read += 1
    assert read > 100


def _archive(path: Path, **changes: object) -> None:
    """Write an archive as torch does, except that the entry of the first tensor is changed in the directory."""
    torch.save({"w": torch.ones(500)}, path)
    with zipfile.ZipFile(path) as archive:
        contents = [(one.filename, archive.read(one)) for one in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents:
            archive.writestr(name, content)
        tensor = next(one for one in archive.infolist() if one.filename.endswith("/data/0"))
        for field, value in changes.items():
            setattr(tensor, field, value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"external_attr": 0o600 << 16 | 16}, "/data/0 is marked as a folder or as encrypted"),
        ({"flag_bits": 1}, "/data/0 is marked as a folder or as encrypted"),
        ({"header_offset": 0}, "overlaps another"),
        ({"header_offset": 1 << 20}, "overlaps another"),
        ({"compress_size": 3000, "file_size": 3000}, "/data/0 overlaps another"),
    ],
)
def test_an_entry_of_which_torch_would_read_other_bytes_is_named(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    _archive(tmp_path / "a.pt")
    assert torch.equal(lowp.load(tmp_path / "a.pt")["w"], torch.ones(500))
    _archive(tmp_path / "a.pt", **changes)
    for read in (lowp.load, lowp.checkpoint.read):
        with pytest.raises(InvalidCheckpoint, match=words):
            read(tmp_path / "a.pt")


def test_two_entries_whose_names_differ_only_in_case_are_refused(tmp_path: Path) -> None:
    _archive(tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt", "a") as archive:
        archive.writestr("a/DATA.pkl", b"")
    with pytest.raises(InvalidCheckpoint, match="two entries have one name"):
        lowp.load(tmp_path / "a.pt")


@pytest.mark.parametrize("around", [(b"", b"behind"), (b"before", b"")])
def test_an_archive_within_another_file_is_refused(tmp_path: Path, around: tuple[bytes, bytes]) -> None:
    path = _torch_file(tmp_path)
    path.write_bytes(around[0] + path.read_bytes() + around[1])
    with pytest.raises(InvalidCheckpoint, match=r"damaged or not a torch file|not a torch file, and was not opened"):
        lowp.load(path)


def test_overlapping_entries_are_refused_before_they_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """1,000 entries of the same 1 MB would be a thousand times the file."""
    path = tmp_path / "a.pt"
    _archive(path)
    with zipfile.ZipFile(path, "a") as archive, warnings.catch_warnings():
        archive.writestr("a/data/1", bytes(1 << 20))
        for number in range(2, 1000):
            again = zipfile.ZipInfo(f"a/data/{number}")
            one = archive.getinfo("a/data/1")
            again.header_offset, again.CRC = one.header_offset, one.CRC
            again.file_size = again.compress_size = one.file_size
            archive.filelist.append(again)
            archive.NameToInfo[again.filename] = again
        archive._didModify = True  # type: ignore[attr-defined]
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("payloads were read"))
    with pytest.raises(InvalidCheckpoint, match="overlaps another"):
        lowp.load(path)
