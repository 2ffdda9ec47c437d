"""Files are replaced atomically, by one process, and only regular files are replaced."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
import subprocess
import sys
from pathlib import Path

import forked
import pytest
import torch
from torch import nn

import lowp
from lowp import checkpoint, files
from lowp.checkpoint import InvalidCheckpoint
from lowp.errors import InvalidInput, NotWritten, Unavailable
from lowp.portable import convert

fcntl, resource = pytest.importorskip("fcntl"), pytest.importorskip("resource")


def write(path: Path, content: bytes = b"new") -> None:
    with files.replacing(path) as file:
        file.write(content)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed")
def test_where_files_have_no_locks_and_no_modes_one_is_closed_before_it_is_renamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def renamed(source: Path, target: Path) -> None:  # as Windows does
        links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.exists()]
        assert str(source) not in links, "PermissionError: the file is open"
        replace(source, target)

    replace = os.replace
    monkeypatch.setattr(files, "_fcntl", None)
    monkeypatch.setattr(os, "replace", renamed)
    for name in ("fchmod", "fchown"):
        monkeypatch.delattr(os, name)
    for content in (b"old\n", b"new\n"):
        write(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content and names(tmp_path) == ["file"]


def test_what_is_not_its_own_is_not_replaced_and_one_function_says_so(tmp_path: Path) -> None:
    mine, empty = tmp_path / "mine", tmp_path / "empty"
    mine.write_text("mine")
    empty.touch()
    with pytest.raises(InvalidInput) as refused:
        files.check_target(mine, lambda target: "a report" if target == mine else "")
    assert str(refused.value) == f"{mine} is not a report and was not changed: give another name"
    assert files.check_target(mine, lambda target: "") == mine
    assert files.check_target(empty, lambda target: "a report") == empty  # of touch or mkstemp
    for path in (mine, empty):
        with pytest.raises(InvalidInput, match=r"already exists: give --overwrite \(overwrite=True\), or another file"):
            files.check_target(path, overwrite=False)
    assert files.check_target(tmp_path / "new", lambda target: "a report", overwrite=False) == tmp_path / "new"
    with pytest.raises(InvalidInput, match=r"mine is not a checkpoint of this lowp \(.*mine is damaged or not a torch"):
        checkpoint.check_replaceable(mine)


def test_a_device_a_pipe_and_a_folder_are_never_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    for path in (tmp_path / "pipe", tmp_path / "link", Path("/dev/null")):
        with pytest.raises(InvalidInput, match="is a device, a pipe or a socket and is not replaced"):
            write(path)
        with pytest.raises(InvalidInput, match="is a device, a pipe or a socket"):
            files.check_target(path)
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    with pytest.raises(InvalidInput, match="is a folder: give a file in it"):
        write(tmp_path)
    with pytest.raises(InvalidInput, match=r"there is no folder .*: create it first"):
        write(tmp_path / "no" / "file")
    assert names(tmp_path) == ["link", "pipe"]


def test_a_link_stays_a_link_and_what_it_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def _with_links_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    def lstat(path: Path | str) -> os.stat_result:
        found = true_lstat(path)
        other = os.stat_result((*found[:4], found.st_uid + 1, *found[5:10]))
        return other if stat.S_ISLNK(found.st_mode) else found

    true_lstat = os.lstat
    monkeypatch.setattr(os, "lstat", lstat)


def test_a_link_of_another_user_is_not_followed_even_through_an_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "planted").symlink_to("real")
    (tmp_path / "link").symlink_to("planted")
    _with_links_of_another_user(monkeypatch)
    for path in (tmp_path / "planted", tmp_path / "link"):
        for use in (write, files.check_target):
            with pytest.raises(InvalidInput, match="is a link of another user and is not followed: give the file itse"):
                use(path)
    assert (tmp_path / "real").read_bytes() == b"old"


@pytest.mark.parametrize("way", ["file", "link"])
def test_a_read_only_file_is_never_replaced_not_even_by_root(tmp_path: Path, way: str) -> None:
    (tmp_path / "file").write_bytes(b"old")
    (tmp_path / "file").chmod(0o444)
    (tmp_path / "link").symlink_to("file")
    for use in (write, files.check_target, lambda path: checkpoint.save(path, model=nn.Linear(1, 1))):
        with pytest.raises(InvalidInput, match=f"{way} cannot be written: it is read-only"):
            use(tmp_path / way)
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file", "link"]


@pytest.mark.parametrize(("name", "words"), [("a" * 300, "File name too long"), ("a\0b", "null")])
def test_names_that_no_file_can_have_are_refused_in_words(tmp_path: Path, name: str, words: str) -> None:
    for use in (write, files.check_target, lambda path: checkpoint.save(path, model=nn.Linear(1, 1))):
        with pytest.raises(InvalidInput, match=f"cannot be a file: .*{words}"):
            use(tmp_path / name)
    for path in (tmp_path / name, str(tmp_path / name)):
        for read in (lowp.load, checkpoint.read, lambda path: convert(path, tmp_path / "out.pt", "bf16")):
            with pytest.raises(InvalidCheckpoint, match="there is no checkpoint"):
                read(path)


def test_without_a_free_descriptor_the_documented_errors_are_raised(tmp_path: Path) -> None:
    path, model = tmp_path / "run.pt", nn.Linear(1, 1)
    checkpoint.save(path, model=model)
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    opened, limits = [], resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/dev/fd")) + 8, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(NotWritten, match=r"run\.pt was not written, and is as it was: Too many open files"):
            checkpoint.save(path, model=model)
        for read in (lambda: lowp.load(path, model=model), lambda: lowp.load(tmp_path / "weights.pt")):
            with pytest.raises(InvalidCheckpoint, match=r"\.pt cannot be read: Too many open files"):
                read()
        with pytest.raises(InvalidCheckpoint, match=r"weights\.pt cannot be read: Too many open files"):
            convert(tmp_path / "weights.pt", tmp_path / "out.pt", "bf16")
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_replaced_file_keeps_its_mode_and_a_new_one_follows_the_umask(tmp_path: Path) -> None:
    for mode in (0o600, 0o640, 0o666):
        (tmp_path / "file").write_bytes(b"old")
        (tmp_path / "file").chmod(mode)
        write(tmp_path / "file")
        assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == mode
    before = os.umask(0o027)
    try:
        write(tmp_path / "fresh")
        assert stat.S_IMODE((tmp_path / "fresh").stat().st_mode) == 0o640
    finally:
        assert os.umask(before) == 0o027


def test_the_umask_of_the_process_is_never_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "umask", lambda mask: pytest.fail("another thread's files would be open to all"))
    write(tmp_path / "file")


def test_an_error_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(ZeroDivisionError), files.replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise ZeroDivisionError
    assert (tmp_path / "file").read_bytes() == b"old"
    assert names(tmp_path) == ["file"]


def test_what_killed_writers_left_is_removed_and_what_others_own_is_not(tmp_path: Path) -> None:
    for left in (".run.pt.0123456789abcdef.part", ".run.pt.a_b1c2d3.part"):
        (tmp_path / left).write_bytes(b"cut")
    kept = [".other.pt.0123456789abcdef.part", ".run.pt.part", ".run.pt.best.pt.0123456789abcdef.part", "run.pt.part"]
    for other in kept:
        (tmp_path / other).write_bytes(b"whole")
    with files.replacing(tmp_path / "run.pt") as file:  # its own is held: a second writer leaves it alone
        file.write(b"first")
        write(tmp_path / "run.pt", b"second")
        assert (tmp_path / "run.pt").read_bytes() == b"second"
    assert (tmp_path / "run.pt").read_bytes() == b"first"
    assert names(tmp_path) == sorted([*kept, "run.pt"])


def test_a_lock_that_a_full_disk_does_not_take_is_named_and_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    path = tmp_path / "run.pt"
    with pytest.raises(NotWritten) as raised, files.sole_writer(path):
        pass
    assert (
        str(raised.value) == f"{tmp_path}/.run.pt.lock, the lock of {path}, cannot be written: No space left on device"
    )
    assert names(tmp_path) == []
    monkeypatch.undo()
    with files.sole_writer(path):
        assert names(tmp_path) == [".run.pt.lock"]


def test_the_longest_names_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("ü" * 127)
    write(path)
    with files.sole_writer(path):
        write(path, b"again")
    assert names(tmp_path) == [path.name]


_FULL = """
import resource, signal, sys, torch
from pathlib import Path
from lowp import checkpoint, files
from lowp.errors import NotWritten
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
model = torch.nn.Linear(100, 100)
def plain():
    with files.replacing(Path("run.pt")) as file:
        file.write(bytes(10000))
for write in (plain, lambda: checkpoint.save("run.pt", model=model)):
    try:
        write()
    except NotWritten as error:
        print(error)
"""


def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "run.pt").write_bytes(b"old")
    result = forked.run("-c", _FULL, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines() == ["run.pt was not written, and is as it was: File too large"] * 2
    assert (tmp_path / "run.pt").read_bytes() == b"old"
    assert names(tmp_path) == ["run.pt"]


_HOLDER = """
import sys
from pathlib import Path
from lowp import files
with files.sole_writer(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


def test_a_second_process_is_told_who_writes(tmp_path: Path) -> None:
    path = tmp_path / "run.pt"
    environment = {**os.environ, "PYTHONPATH": forked.SOURCES}
    command = [sys.executable, "-c", _HOLDER, str(path)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        said = (
            rf"run\.pt is being written by another process \({holder.pid}\): wait until it has ended, or give another"
        )
        with pytest.raises(Unavailable, match=said), files.sole_writer(path):
            pass
        holder.kill()
    assert names(tmp_path) == [".run.pt.lock"]  # of a process that was killed: it holds nobody up
    with files.sole_writer(path):
        pass
    assert names(tmp_path) == []


def test_one_file_has_many_names(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    (tmp_path / "hard").hardlink_to(tmp_path / "a")
    (tmp_path / "soft").symlink_to("b")
    assert files.same_file(tmp_path / "a", tmp_path / "hard")
    assert files.same_file(tmp_path / "b", tmp_path / "soft")
    assert files.same_file(tmp_path / "c", tmp_path / "." / "c")
    assert not files.same_file(tmp_path / "a", tmp_path / "b")


def test_a_folder_that_cannot_be_written_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(NotWritten, match="run was not written, and is as it was: Permission denied"):
        write(tmp_path / "run")


def test_json_has_no_infinity_and_a_damaged_file_no_object(tmp_path: Path) -> None:
    document = {"a": math.nan, 2: (1, -math.inf, 0.5), "c": {"d": [True, None, "e"]}}
    text = (
        '{\n "a": null,\n "2": [\n  1,\n  null,\n  0.5\n ],\n "c": {\n  "d": [\n   true,\n   null,\n   "e"\n  ]\n }\n'
    )
    text += "}\n"
    assert files.json_text(document) == text
    path = tmp_path / "one.json"
    for content, whole, first in (
        *((text, json.loads(text), {}), ('{"a": 1}\n{"b": 2}', {}, {"a": 1}), ("[1]", {}, {}), ("{", {}, {})),
        *(("[" * 100_000, {}, {}), ("\x80", {}, {})),
    ):
        path.write_text(content, encoding="latin-1")
        assert (files.json_object(path), files.json_object(path, first_line=True)) == (whole, first)
    assert files.json_object(tmp_path / "none.json") == {}


def test_a_file_of_another_kind_is_known_by_its_first_4_kib(tmp_path: Path) -> None:
    path, lacks = tmp_path / "page.html", files.lacking("a page of lowp", b"mark")
    for content, is_replaced in (
        (b"", True),
        (b"x" * 4092 + b"mark", True),
        (b"x" * 4093 + b"mark", False),
        (b"x", False),
    ):
        path.write_bytes(content)
        if is_replaced:
            assert files.check_target(path, lacks) == path
        else:
            with pytest.raises(
                InvalidInput, match=r"page\.html is not a page of lowp and was not changed: give another name"
            ):
                files.check_target(path, lacks)


def test_while_a_file_is_written_its_parts_are_as_open_as_they_have_to_be(tmp_path: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    path = tmp_path / "run.pt"
    for mode in (0o666 & ~umask, 0o600):  # as the umask says where there is no file yet
        with files.sole_writer(path), files.replacing(path) as file:
            file.write(b"1")
            modes = {one.suffix: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir() if one != path}
        assert modes == {".lock": 0o666 & ~umask, ".part": mode} and names(tmp_path) == ["run.pt"]
        path.chmod(0o644)


def test_where_files_have_no_owners_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    monkeypatch.delattr(os, "geteuid")
    assert files._is_own(tmp_path / "link")
