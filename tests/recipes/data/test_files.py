"""Files of data sets are found, read and named in errors."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from lowp.errors import InvalidInput, Unavailable
from lowp.recipes.data.files import Published, optional, read_bytes, read_columns, read_text

SET = Published("A set", "somewhere")


def test_a_file_is_found_up_to_two_folders_below(tmp_path: Path) -> None:
    for name in ("a/b/c/x.txt", "a/b/x.txt", "a/y.txt.gz", "a/x.txt", "z.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert SET.find(tmp_path, ["x.txt"]) == tmp_path / "a/x.txt"
    assert SET.find(tmp_path, ["w.txt", "y.txt"]) == tmp_path / "a/y.txt.gz"
    assert SET.find(tmp_path, ["*.txt"]) == tmp_path / "z.txt"
    assert SET.find(tmp_path / "a/b", ["x.txt"]) == tmp_path / "a/b/x.txt"
    assert SET.find(tmp_path / "z.txt", ["*.txt"]) == tmp_path / "z.txt"
    assert SET.find_or_none(tmp_path / "z.txt", ["x.txt"]) is None
    for name in ("a/x.txt", "a/b/x.txt"):
        (tmp_path / name).unlink()
    assert SET.find_or_none(tmp_path, ["x.txt"]) is None  # three folders below
    (tmp_path / "x.txt").symlink_to(tmp_path / "gone")
    assert SET.find_or_none(tmp_path, ["x.txt"]) is None


@pytest.mark.parametrize(("count", "listed"), [(0, 0), (1, 1), (6, 6), (7, 6), (9, 6)])
def test_what_is_there_instead_is_listed(tmp_path: Path, count: int, listed: int) -> None:
    for place in range(count):
        (tmp_path / f"f{place}").write_text("")
    with pytest.raises(InvalidInput) as caught:
        SET.find(tmp_path, ["x", "y"])
    names = ", ".join(f"f{place}" for place in range(listed)) or "nothing"
    more = f" and {count - listed} more" if count > listed else ""
    holds = f"it holds {names}{more}"
    assert str(caught.value) == f"A set: looked for x or y in {tmp_path}; {holds}. Get it from somewhere"


def test_a_path_that_is_no_folder_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "; it is a file. Get" in str(SET.missing(tmp_path / "file", ["x"]))
    assert "; it is not there. Get" in str(SET.missing(tmp_path / "none", ["x"]))


def test_files_are_read_packed_or_not_and_what_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress("é".encode()))
    (tmp_path / "a.txt").write_bytes("\ufeffé".encode())
    assert read_text(SET, tmp_path / "a.txt.gz") == read_text(SET, tmp_path / "a.txt") == "é"
    (tmp_path / "b.txt").write_bytes(b"ab\xff")
    with pytest.raises(InvalidInput, match=r"b\.txt is not UTF-8 text: byte 2 is 0xff\. Get it again from somewhere"):
        read_text(SET, tmp_path / "b.txt")
    (tmp_path / "b.gz").write_bytes(b"no")
    for name in ("b.gz", "none"):
        with pytest.raises(InvalidInput, match=f"{name} cannot be read: "):
            read_bytes(SET, tmp_path / name)
    with pytest.raises(Unavailable, match="this, which is not installed: pip install"), optional("this"):
        raise ImportError


def test_columns_come_in_the_order_asked_for_with_the_lines_of_their_rows(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text('x,y,z\n1,"a\nb",3\n\n4,5,6\n')
    assert read_columns(SET, file, ("z", "x")) == [(3, 5), ("3", "6"), ("1", "4")]
    file.write_text("x,y\n")
    assert read_columns(SET, file, ("y",)) == [(), ()]
    for text, words in (
        ("x,y\n1\n", "has 2 columns, but line 2 has a different number"),
        ("x,y\n1,2\n1,2,3\n", "but line 3 has a different number"),
        ("x\n1\n", "has no column y, z; it has x"),
        ("", "has no column y, z; it has nothing"),
        ('x,y,z\n"a', "is not CSV: "),
    ):
        file.write_text(text)
        with pytest.raises(InvalidInput) as caught:
            read_columns(SET, file, ("x", "y") if "different" in words else ("y", "z"))
        assert words in str(caught.value)
