"""Checkpoints in other formats: written files open anywhere, read files are checked, and nothing is executed."""

from __future__ import annotations

import json
import math
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import casts
from lowp.checkpoint import InvalidCheckpoint
from lowp.errors import InvalidInput, LowpError, NotWritten
from lowp.portable import convert, converting, safetensors_file, stored
from lowp.portable.safetensors_file import Spool
from lowp.portable.sources import open_source
from lowp.portable.stored import is_shape, overflow_limit

safetensors = pytest.importorskip("safetensors.torch")
FORMATS = [name for name in lowp.FORMATS if name != "e8m0"] + ["e5m7", "i6s", "binary8p3se", "e2m1@e4m3fn@fp32/16"]


def _state() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "linear.weight": torch.randn(10, 33),
        "linear.bias": torch.randn(10),
        "convolution.weight": torch.randn(4, 3, 5, 3) * 1e-3,
        "steps": torch.tensor(3),
    }


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors.save_file(_state(), "in.safetensors", metadata={"format": "pt", "author": "someone"})
    torch.save(_state(), "in.pt")


def _shards() -> None:
    """Write a checkpoint in two shards to the folder `shards`."""
    os.mkdir("shards")
    names = [list(_state())[:2], list(_state())[2:]]
    weight_map = {}
    for place, held in enumerate(names, 1):
        file = f"model-0000{place}-of-00002.safetensors"
        safetensors.save_file({name: _state()[name] for name in held}, f"shards/{file}", metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(held, file))
    index = {"metadata": {"total_size": 1, "kind": "test"}, "weight_map": weight_map}
    Path("shards/model.safetensors.index.json").write_text(json.dumps(index))


# -- what is written --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("source", "target"), [("in.safetensors", "out.safetensors"), ("in.pt", "out.pt")])
def test_every_format_is_read_back_as_its_values(format: str, source: str, target: str) -> None:
    reports = {one.name: one for one in convert(source, target, format).tensors}
    found = lowp.load(target)
    for name, tensor in _state().items():
        wanted = tensor if reports[name].reason else lowp.quantize(tensor, format)
        assert torch.equal(found[name].to(tensor.dtype), wanted.to(found[name].dtype).to(tensor.dtype))
        assert found[name].dtype is (torch.float32 if tensor.is_floating_point() else tensor.dtype)
    assert not reports["linear.weight"].reason


def test_a_format_with_a_dtype_opens_in_plain_torch_and_in_safetensors() -> None:
    convert("in.pt", "out.pt", "bf16")
    convert("in.pt", "out.safetensors", "e4m3fn")
    assert torch.load("out.pt", weights_only=True)["linear.weight"].dtype is torch.bfloat16
    found = safetensors.load_file("out.safetensors")
    assert found["linear.weight"].dtype is torch.float8_e4m3fn
    assert torch.equal(found["linear.weight"].float(), lowp.quantize(_state()["linear.weight"], "e4m3fn"))


def test_packed_files_open_in_safetensors_as_codes_and_scales_named_in_the_metadata() -> None:
    convert("in.safetensors", "out.safetensors", "int4")
    found = safetensors.load_file("out.safetensors")
    assert found["linear.weight.codes"].shape == (10, 17)
    assert found["linear.weight.scale"].shape == (10, 2)
    with safetensors.safe_open("out.safetensors", "pt") as file:
        metadata = file.metadata()
    assert metadata["lowp.format"] == "int4"
    assert json.loads(metadata["lowp.tensors"])["linear.weight"] == {
        "cast": "int4",
        "shape": [10, 33],
        "dtype": "float32",
    }


def test_metadata_is_kept_also_through_a_torch_file() -> None:
    convert("in.safetensors", "middle.pt", "bf16")
    convert("middle.pt", "out.safetensors", "fp32")
    with safetensors.safe_open("out.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "author": "someone", "lowp.format": "fp32"}


def test_what_torch_knows_of_modules_is_kept() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    torch.save(model.state_dict(), "model.pt")
    convert("model.pt", "out.pt", "fp32")
    state = torch.load("out.pt", weights_only=True)
    assert state._metadata["1"] == {"version": 2}
    assert model.load_state_dict(state)


def test_a_converted_file_is_converted_again() -> None:
    convert("in.safetensors", "small.safetensors", "mxfp4")
    convert("small.safetensors", "out.safetensors", "fp16")
    found = safetensors.load_file("out.safetensors")
    assert torch.equal(found["linear.weight"].float(), lowp.quantize(_state()["linear.weight"], "mxfp4"))


def test_shards_stay_shards_with_an_index_of_what_they_hold() -> None:
    _shards()
    os.mkdir("out")
    convert("shards", "out", "int8")
    index = json.loads(Path("out/model.safetensors.index.json").read_text())
    assert index["metadata"]["kind"] == "test"
    assert index["metadata"]["total_size"] == 10 * 33 + 4 * 10 + 4 * 10 + 4 * 3 * 5 * 3 + 4 * 4 * 3 * 5 + 8
    assert index["weight_map"]["linear.weight.codes"] == "model-00001-of-00002.safetensors"
    found = lowp.load("out")
    assert torch.equal(found["linear.weight"], lowp.quantize(_state()["linear.weight"], "int8"))
    assert torch.equal(found["steps"], torch.tensor(3))


def test_shards_become_one_file() -> None:
    _shards()
    convert("shards/model.safetensors.index.json", "out.safetensors", "fp32")
    found = safetensors.load_file("out.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in _state().items())


def test_shards_tell_what_lies_in_them_as_one_file_would() -> None:
    _shards()
    with open_source(Path("shards/model.safetensors.index.json")) as source:
        assert sorted(source.stored) == sorted(_state())
        assert all(torch.equal(source.stored[name](), tensor) for name, tensor in _state().items())


def test_weights_are_given_in_bf16_where_asked() -> None:
    convert("in.pt", "out.safetensors", "int8")
    found = lowp.load("out.safetensors", dtype=torch.bfloat16)
    assert found["linear.weight"].dtype is torch.bfloat16
    assert found["steps"].dtype is torch.int64


@pytest.mark.parametrize("file", ["tied.pt", "tied.safetensors"])
def test_tensors_that_are_loaded_have_memory_of_their_own(file: str) -> None:
    x = torch.arange(4.0)
    torch.save({"a": x, "b": x[:2], "count": torch.tensor([3])}, "tied.pt")
    safetensors.save_file({"a": x, "b": x[:2].clone(), "count": torch.tensor([3])}, "tied.safetensors")
    found, again = lowp.load(file), lowp.load(file, map_location="cpu")
    for one in found.values():
        one.add_(1)
    assert {name: one.tolist() for name, one in found.items()} == {"a": [1, 2, 3, 4], "b": [1, 2], "count": [4]}
    assert {name: one.tolist() for name, one in again.items()} == {"a": [0, 1, 2, 3], "b": [0, 1], "count": [3]}
    nowhere = lowp.load(file, map_location="meta")
    for one in (again, nowhere):
        dtypes = {name: tensor.dtype for name, tensor in one.items()}
        assert dtypes == {"a": torch.float32, "b": torch.float32, "count": torch.int64}
    assert {one.device.type for one in nowhere.values()} == {"meta"}


def test_stochastic_rounding_draws_the_same_bits_in_pieces() -> None:
    x = torch.randn(3000, 700)
    torch.save({"x": x}, "large.pt")
    convert("large.pt", "out.safetensors", "e4m3fn:stochastic", seed=5)
    assert torch.equal(lowp.load("out.safetensors")["x"], lowp.quantize(x, "e4m3fn:stochastic", seed=5))


@pytest.mark.parametrize("format", ["e4m3fn@fp32/8x4", "e4m3fn@fp32/128x128", "mxfp8", "i8s@fp32/channel", "nvfp4"])
def test_large_tensors_are_stored_in_pieces_that_cut_no_group(format: str) -> None:
    x, wide = torch.randn(900, 701), torch.randn(3, 140, 650)
    torch.save({"x": x, "wide": wide}, "large.pt")
    for cast in (format, f"{format}:stochastic"):
        convert("large.pt", "out.safetensors", cast, seed=5, overwrite=True)
        found = lowp.load("out.safetensors")
        assert torch.equal(found["x"], lowp.quantize(x, cast, seed=5))
        assert torch.equal(found["wide"], lowp.quantize(wide, cast, seed=5))


@pytest.mark.parametrize(
    ("shape", "format", "rows"),  # how many rows a piece has, of 2**17 numbers at most if that is possible
    [
        *(
            ((512, 256), "fp16", 512),
            ((513, 256), "fp16", 512),
            ((3, 1 << 18), "fp16", 1),
            ((1 << 18,), "fp16", 1 << 17),
        ),
        *(((4, 200, 500), "mxfp8", 1), ((900, 700), "mxfp8", 187), ((900, 700), "i8s@fp32/row", 187)),
        *(((900, 700), "i8s@fp32/tensor", 900), ((900, 700), "nvfp4", 900), ((1 << 18,), "mxfp8", 1 << 18)),
        *(((900, 700), "e4m3fn@fp32/8x4", 184), ((900, 700), "e4m3fn@fp32/128x128", 128), ((0, 5), "fp16", 0)),
        *(((2, 900, 700), "e4m3fn@fp32/8x4", 1), ((900, 1 << 15), "e4m3fn@fp32/128x128", 128), ((), "fp16", None)),
    ],
)
def test_pieces_are_as_large_as_the_cache_and_hold_whole_groups(
    shape: tuple[int, ...], format: str, rows: int | None
) -> None:
    x = torch.empty(shape, dtype=torch.int8)
    pieces = list(stored.pieces_of(x, casts.parse(format)))
    if rows is None:
        assert len(pieces) == 1 and pieces[0][0] is x
        return
    assert {len(one) for one, _ in pieces[:-1]} <= {rows} and len(pieces[0][0]) == min(rows, len(x))
    assert torch.cat([one for one, _ in pieces]).shape == x.shape
    assert [offset for _, offset in pieces] == [place * rows * math.prod(shape[1:]) for place in range(len(pieces))]


def test_one_tensor_is_in_memory_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    read = safetensors_file.read_tensor

    def watched(*arguments: Any) -> Tensor:
        assert sum(one() is not None for one in alive) <= 1
        tensor = read(*arguments)
        alive.append(weakref.ref(tensor))
        return tensor

    safetensors.save_file({f"x{place}": torch.zeros(2, 2) for place in range(6)}, "many.safetensors")
    monkeypatch.setattr(safetensors_file, "read_tensor", watched)
    convert("many.safetensors", "out.safetensors", "int8")
    assert len(alive) == 6


# -- the report -------------------------------------------------------------------------------------------------------
def test_the_report_counts_errors_what_was_flushed_and_what_overflowed() -> None:
    x = torch.tensor([[1.0, 1.06, 1e-4, 500.0, -0.0]])
    torch.save({"x": x}, "x.pt")
    (one,) = convert("x.pt", "out.pt", "e4m3fn:saturate").tensors
    error = (lowp.quantize(x, "e4m3fn:saturate") - x).double()
    assert one.largest_error == 52
    assert one.rms_error == pytest.approx(float(error.square().mean().sqrt()))
    assert (one.flushed, one.overflowed) == (1, 1)


def _overflowed(x: Tensor, format: str) -> int:
    torch.save({"x": x}, "x.pt")
    (one,) = convert("x.pt", "out.pt", format, overwrite=True).tensors
    return one.overflowed


def test_numbers_beyond_a_scale_that_is_at_its_end_have_overflowed() -> None:
    x = torch.ones(2, 16)
    for count, number in enumerate((57119.0, 57120.0, -57120.0, 1e6, 1e3)):  # 127.5 times 448, the largest scale
        x[0, count] = number
        assert _overflowed(x, "i8s@e4m3fn/16") == min(count, 3)


@pytest.mark.parametrize(
    ("format", "rest", "limit"),  # the element is that of the rest: beyond are 7, and 7.5 sevenths of 6
    [("nvfp4", [1.5, 0.5, 3.0], 7), ("if4", [1.5, 0.5, 3.0], 7), ("if4", [30 / 7, 18 / 7, 6 / 7], 7.5 * 6 / 7)],
)
@pytest.mark.parametrize("more", [[], [7.2], [7.001, -7.001], [6.999, -6.999], [6.43], [6.428], [6.2, 6.3]], ids=str)
def test_numbers_beyond_the_element_of_a_block_have_overflowed(
    format: str, rest: list[float], limit: float, more: list[float]
) -> None:
    """The scale of the second block, 1.4 of the smallest one, is rounded to that."""
    numbers = [8.4, *more, *rest, *rest]
    x = torch.zeros(2, 16)
    x[0, 0], x[1, : len(numbers)] = 6 * 448, torch.tensor(numbers) * 2.0**-9
    assert _overflowed(x, format) == sum(abs(one) >= limit for one in numbers)


def test_zeros_that_become_other_numbers_are_not_counted_as_flushed() -> None:
    torch.save({"x": torch.tensor([[0.0, 1.0, -2.0, 0.5, -0.0]])}, "x.pt")
    (one,) = convert("x.pt", "out.pt", "binary").tensors
    assert (one.flushed, one.overflowed) == (0, 0)


@pytest.mark.parametrize(
    ("numbers", "format", "reason"),
    [
        ([torch.nan, 1e6], "fp16", "a number is beyond 65504; fp16:saturate would cut them"),
        ([torch.nan, torch.inf, 1.0], "fp16", ""),
        ([torch.inf, 1.0], "e4m3fn", "holds 0 NaN and 1 infinite numbers, which e4m3fn has not"),
        ([-torch.inf, torch.inf], "int8", "holds 0 NaN and 2 infinite numbers, which int8 has not"),
        ([torch.nan, 1.0], "e4m3fn", ""),
        ([-1.0, 1.0], "e8m0", "holds negative numbers, which e8m0 has not"),
        ([65519.0, -65519.0], "fp16", ""),
        ([1.0, -65520.0], "fp16", "a number is beyond 65504; fp16:saturate would cut them"),
    ],
)
def test_a_tensor_is_kept_whose_numbers_a_format_cannot_hold(numbers: list[float], format: str, reason: str) -> None:
    torch.save({"x": torch.tensor([numbers])}, "x.pt")
    (one,) = convert("x.pt", "out.pt", format).tensors
    assert one.reason == reason


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3fn", "e5m2", "e4m3fnuz", "e5m7", "e3m4", "tf32"])
def test_the_limit_of_overflow_is_the_first_number_that_a_cast_rounds_beyond_the_largest(name: str) -> None:
    limit = overflow_limit(lowp.Cast(lowp.FORMATS.get(name) or lowp.format(name)).element)
    below = math.nextafter(limit, 0)
    found = lowp.quantize(torch.tensor([limit, below, -limit], dtype=torch.float64), name)
    assert found.isfinite().tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("shape", "is_one"),
    [
        ([], True),
        ([0, (1 << 60) - 1], True),
        ([0, 1 << 60], False),
        ([1 << 30, 1 << 30], False),
        ([2.0], False),
        ([True], False),
        ([-1], False),
        ((3,), False),
        ([1] * 64, True),
        ([1] * 65, False),
    ],
)
def test_a_shape_in_a_file_is_one_that_torch_can_have(shape: Any, is_one: bool) -> None:
    assert is_shape(shape) is is_one


def test_what_is_kept_is_told_with_why(lowp: Callable[..., Any]) -> None:
    state = {"a": torch.tensor([[1.0, 1e6]]), "b": torch.tensor([[1.0, torch.nan]]), "c": torch.ones(2, 2)}
    torch.save(state, "odd.pt")
    result = lowp("convert", "odd.pt", "out.pt", "--to", "fp16", "--keep", "c")
    assert result.code == 0
    assert "kept in float32, a number is beyond 65504; fp16:saturate would cut them: a" in result.out
    assert "kept in float32, asked for (keep): c" in result.out
    Path("report.json").write_text('{"mine": 1}')
    result = lowp("convert", "odd.pt", "out.pt", "--to", "int8", "--overwrite", "--report", "report.json")
    assert "report.json is not a report of lowp convert and was not changed" in result.err
    Path("report.json").unlink()
    for _ in range(2):
        result = lowp("convert", "odd.pt", "out.pt", "--to", "int8", "--overwrite", "--report", "report.json")
    assert "holds 1 NaN and 0 infinite numbers, which int8 has not: b" in result.out
    assert [bool(one["reason"]) for one in json.loads(Path("report.json").read_text())["tensors"]] == [
        False,
        True,
        False,
    ]


# -- what a run wrote -------------------------------------------------------------------------------------------------
def _train_and_save(name: str) -> None:
    precision = lowp.Precision(name)
    model = nn.Linear(4, 2)
    model, optimizer = precision.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with precision.autocast():
        loss = model(torch.ones(3, 4)).float().sum()
    precision.backward(loss)
    precision.step(optimizer)
    lowp.save(f"{name}.pt", model=model, optimizer=optimizer, precision=precision)


def test_a_checkpoint_of_a_run_in_any_precision_opens_in_torch_without_lowp() -> None:
    names = ["fp32", "fp16", "bf16", "fp16-storage", "fp8", "dfp16", "flex16+5", "e5m7"]
    for name in names:
        _train_and_save(name)
    code = (
        "import sys; sys.modules['lowp'] = None\n"
        "import torch\n"
        f"for name in {names}:\n"
        "    model = torch.nn.Linear(4, 2)\n"
        "    model.load_state_dict(torch.load(name + '.pt', weights_only=True)['model'])\n"
        "    print(model.weight.dtype, model.weight.sum().item().hex())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    for name, line in zip(names, found.splitlines(), strict=True):
        state = lowp.load(f"{name}.pt", dtype=torch.float32)
        assert line == f"torch.float32 {state['weight'].sum().item().hex()}"
        convert(f"{name}.pt", f"{name}.safetensors", "fp32")
        assert torch.equal(safetensors.load_file(f"{name}.safetensors")["weight"], state["weight"])


# -- what is refused --------------------------------------------------------------------------------------------------
def _header(text: str, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + data


ONE = '{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
HOSTILE = {
    "empty": b"",
    "a length beyond the file": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": _header("{nothing"),
    "deep JSON": _header('{"a":' + "[" * 100_000),
    "no object": _header("[1]"),
    "a list for a tensor": _header('{"a":[1]}'),
    "an unknown dtype": _header('{"a":{"dtype":"F3","shape":[],"data_offsets":[0,0]}}'),
    "a shape below zero": _header('{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}', b"1"),
    "a shape of truth": _header('{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}', b"1"),
    "a shape whose product overflows": _header(
        '{"a":{"dtype":"F64","shape":[0,2305843009213693952,2305843009213693952],"data_offsets":[0,0]}}'
    ),
    "a shape of 100 dimensions": _header(f'{{"a":{{"dtype":"U8","shape":{[1] * 100},"data_offsets":[0,1]}}}}', b"1"),
    "a shape of 30,000 dimensions": _header(
        f'{{"a":{{"dtype":"U8","shape":{[1 << 61] * 30_000},"data_offsets":[0,1]}}}}', b"1"
    ),
    "offsets that do not fit": _header('{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}', b"1234"),
    "an overlap": _header(ONE + ',"b":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}', b"123456"),
    "a gap": _header(ONE + ',"b":{"dtype":"U8","shape":[1],"data_offsets":[5,6]}}', b"123456"),
    "a name twice": _header(ONE + "," + ONE[1:] + "}", b"1234"),
    "bytes behind the end": _header(ONE + "}", b"12345"),
    "metadata that is no text": _header('{"__metadata__":{"a":1}}'),
    "packed without its scale": _header(
        '{"__metadata__":{"lowp.tensors":"{\\"a\\":{\\"cast\\":\\"int8\\",\\"shape\\":[4],\\"dtype\\":\\"float32\\"}}"},'
        '"a.codes":{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}',
        b"1234",
    ),
    "packed in no format": _header(
        '{"__metadata__":{"lowp.tensors":"{\\"a\\":{\\"cast\\":\\"int9000\\",\\"shape\\":[4],\\"dtype\\":\\"float32\\"}}"}}'
    ),
}


@pytest.mark.parametrize("content", HOSTILE.values(), ids=HOSTILE.keys())
def test_damaged_safetensors_files_are_refused_in_words(content: bytes) -> None:
    Path("bad.safetensors").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=r"bad\.safetensors is damaged"):
        lowp.load("bad.safetensors")


def test_many_empty_tensors_are_read_in_a_time_that_grows_as_their_number() -> None:
    """In shards and packed; to search for each among all took 20 seconds."""
    count = 10_000
    packed = {f"t{one}": {"cast": "e5m7", "shape": [0, 0], "dtype": "float32"} for one in range(count)}
    stored = {f"{name}.codes": {"dtype": "U8", "shape": [0, 0], "data_offsets": [0, 0]} for name in packed}
    os.mkdir("many")
    header = {"__metadata__": {"lowp.tensors": json.dumps(packed)}, **stored}
    Path("many/a.safetensors").write_bytes(_header(json.dumps(header)))
    index = {"weight_map": dict.fromkeys(stored, "a.safetensors")}
    Path("many/m.safetensors.index.json").write_text(json.dumps(index))
    began = time.process_time()
    with open_source(Path("many")) as source:
        assert len(source.names()) == count
        found = [source.tensor(name) for name in source.names()]
    assert all(one.shape == (0, 0) for one in found)
    assert time.process_time() - began < 5


@pytest.mark.parametrize(
    ("kind", "tensor"),
    [
        ("quantized", lambda: torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)),
        ("meta", lambda: torch.empty(2, device="meta")),
        ("torch.sparse_coo", lambda: torch.eye(2).to_sparse()),
    ],
)
def test_tensors_without_numbers_in_rows_are_named_by_their_kind(kind: str, tensor: Callable[[], Tensor]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's quantized tensors are deprecated
        torch.save({"x": tensor()}, "odd.pt")
    with pytest.raises(InvalidInput, match=rf"odd\.pt: x is a {kind} tensor: give dense tensors"):
        lowp.load("odd.pt")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"root:x:0:0:root:/root:/bin/bash\n", "it begins with b'root:x:0'"),
        (b"", "it is empty"),
        (b"\x80\x05K\x01.", "Invalid magic number"),
    ],
)
def test_a_file_of_another_program_is_said_to_be_no_torch_file(content: bytes, words: str) -> None:
    Path("passwd").write_bytes(content)
    with pytest.raises(InvalidCheckpoint, match=rf"passwd .*not a torch file.*{words}"):
        convert("passwd", "out.pt", "bf16")


def test_what_a_pickle_asks_for_is_named() -> None:
    torch.save(nn.Linear(1, 1), "module.pt")
    with pytest.raises(InvalidCheckpoint, match=r"was not opened: .* \(it names torch\.nn\.modules\.linear\.Linear\)$"):
        lowp.load("module.pt")


def test_a_number_that_is_repeated_beyond_memory_is_refused() -> None:
    torch.save({"x": torch.zeros(1).expand(1 << 42)}, "wide.pt")
    with pytest.raises(InvalidCheckpoint, match="x has 17,592,186,044,416 bytes, more than the file: its numbers are"):
        lowp.load("wide.pt")
    torch.save({"x": torch.ones(1).expand(1 << 20)}, "wide.pt")
    assert lowp.load("wide.pt")["x"].sum() == 1 << 20


def test_a_file_cut_anywhere_is_refused() -> None:
    whole = Path("in.safetensors").read_bytes()
    for end in (3, 8, 100, len(whole) - 1):
        Path("cut.safetensors").write_bytes(whole[:end])
        with pytest.raises(InvalidCheckpoint):
            convert("cut.safetensors", "out.safetensors", "fp16")
    assert not Path("out.safetensors").exists()


@pytest.mark.parametrize("every", [23, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("format", ["fp32", "int4"])
def test_a_flipped_bit_of_a_header_is_refused_or_reads_the_stored_bytes(format: str, every: int) -> None:
    """The format has no checksums: a name may change, but no tensor has other bytes than those of the file."""
    convert("in.safetensors", "whole.safetensors", format)
    content = Path("whole.safetensors").read_bytes()
    begins = 8 + int.from_bytes(content[:8], "little")
    refused = 0
    for bit in range(0, 8 * begins, every):
        edited = bytearray(content)
        edited[bit // 8] ^= 1 << bit % 8
        Path("bad.safetensors").write_bytes(edited)
        try:
            lowp.load("bad.safetensors")
            with open_source(Path("bad.safetensors")) as source:
                raw = [source.stored[name]().reshape(-1).view(torch.uint8) for name in source.stored]
            assert sorted(torch.cat(raw).tolist()) == sorted(content[begins:]), bit
        except InvalidCheckpoint:
            refused += 1
    assert refused > 8 * begins / every / 2


def _edited(content: bytes, draw: random.Random) -> bytes:
    """Return a file with a bit, some bytes or its length changed, with more or fewer bytes, or truncated."""
    edited, place = bytearray(content), draw.randrange(min(len(content), 1500))
    kind = draw.randrange(6)
    if kind == 0:
        edited[place] ^= 1 << draw.randrange(8)
    elif kind == 1:
        edited[place : place + 4] = draw.randbytes(4)
    elif kind == 2:
        edited[:8] = draw.randbytes(8)
    elif kind == 3:
        edited[place:place] = bytes(draw.choice(b'0123456789[]{}",:-eE.') for _ in range(draw.randint(1, 5)))
    elif kind == 4:
        del edited[place : place + draw.randint(1, 8)]
    else:
        del edited[draw.randrange(len(edited)) :]
    return bytes(edited)


@pytest.mark.parametrize("name", ["in.safetensors", "packed.safetensors", "in.pt", "packed.pt"])
def test_a_file_with_random_edits_is_read_or_refused_and_leaves_nothing_behind(name: str) -> None:
    convert("in.safetensors", "packed.safetensors", "int4")
    convert("in.pt", "packed.pt", "nvfp4")
    content, draw, bad = Path(name).read_bytes(), random.Random(name), Path(f"bad{Path(name).suffix}")
    refused = 0
    for _ in range(25):
        bad.write_bytes(_edited(content, draw))
        before = set(os.listdir())
        try:
            convert(bad, "out.safetensors", "bf16")
        except LowpError:  # of which the command prints one line
            refused += 1
        Path("out.safetensors").unlink(missing_ok=True)
        assert set(os.listdir()) == before
    assert refused > 12


class _Runs:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("it-ran"),)


def test_a_torch_file_that_would_run_code_is_refused() -> None:
    torch.save({"weight": torch.ones(2), "evil": _Runs()}, "evil.pt")
    Path("evil.bin").write_bytes(pickle.dumps(_Runs()))
    for name in ("evil.pt", "evil.bin"):
        with pytest.raises(InvalidCheckpoint, match="not"):
            convert(name, "out.safetensors", "fp16")
        with pytest.raises(InvalidCheckpoint):
            lowp.load(name)
    assert not Path("it-ran").exists()


def test_an_index_that_leads_elsewhere_is_refused() -> None:
    for file in ("../in.safetensors", "/etc/passwd", "missing.safetensors", "x.index.json", 3):
        Path("model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": file}}))
        with pytest.raises(InvalidCheckpoint, match=r"which (is|does)"):
            lowp.load("model.safetensors.index.json")


def test_a_torch_file_of_several_states_wants_to_know_which() -> None:
    torch.save({"generator": _state(), "critic": _state()}, "two.pt")
    with pytest.raises(InvalidCheckpoint, match=r"holds 'generator', 'critic'.*--entry"):
        convert("two.pt", "out.pt", "fp16")
    assert len(convert("two.pt", "out.pt", "fp16", entry="critic").tensors) == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("in.pt", "in.pt", "fp16"), "is the input checkpoint"),
        (("in.pt", "in.safetensors", "fp16"), "already exists: give --overwrite"),
        (("in.pt", "out.onnx", "fp16"), "has none of the endings .safetensors, .pt"),
        (("in.pt", ".", "fp16"), "is for shards, but in.pt has none"),
        (("in.pt", "out.pt", "fp15"), "unknown format 'fp15'"),
        (("in.pt", "out.pt", "int8:delayed"), "a delayed scale depends on earlier tensors"),
    ],
)
def test_targets_that_cannot_be_are_refused_before_any_work(arguments: tuple[str, str, str], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        convert(*arguments)
    with pytest.raises(InvalidInput, match="no tensor is named z"):
        convert("in.pt", "out.pt", "fp16", keep=["z"])


def test_a_full_disk_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.pt").write_text("before")

    class Full(Spool):
        def add(self, *_: Any) -> None:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(converting, "Spool", Full)
    with pytest.raises(NotWritten, match="No space left"):
        convert("in.pt", "out.pt", "fp16", overwrite=True)
    assert Path("out.pt").read_text() == "before"
    assert not list(Path().glob(".out*"))
