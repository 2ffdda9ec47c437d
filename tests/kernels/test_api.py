"""The public functions: accepted arguments, unchanged inputs, and errors."""

from __future__ import annotations

import functools
import math
import re
import threading
from typing import Any

import forked
import ml_dtypes
import numpy as np
import pytest
import torch
from exact_casts import FORMATS_TRIED, bits
from torch import Tensor

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import InvalidInput, Unavailable, UnknownName
from lowp.formats import FloatFormat, IntFormat
from lowp.kernels import Statistics, cpu, decode, encode, quantize, statistics, use
from lowp.kernels.casts import run, verbs
from lowp.kernels.choose import dispatch
from lowp.kernels.numbers import packing

EVERY_CAST = ["e4m3fn", "e4m3fn:stochastic", "mxfp4", "int8:stochastic", "flex16+5", "int8-affine"]


# -- layouts ----------------------------------------------------------------------------------------------------------
LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "strided": lambda x: torch.stack((x, x + 1), dim=-1)[..., 0],
    "expanded": lambda x: x[:1].expand(2, -1, -1, -1),
    "parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "negated lazily": lambda x: torch.complex(x, -x).conj().imag,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cast", EVERY_CAST)
@pytest.mark.parametrize("name", [n for n in kernels.available() if n != "native"])
def test_the_layout_does_not_change_the_values(layout: str, cast: str, name: str) -> None:
    x = LAYOUTS[layout](torch.randn(2, 3, 4, 40, generator=torch.Generator().manual_seed(0)))
    plain = quantize(x.clone(memory_format=torch.contiguous_format).resolve_neg(), cast, seed=3)
    with use(name):
        found = quantize(x, cast, seed=3)
    assert torch.equal(found, plain)
    assert found.stride() == torch.empty_like(x).stride()
    assert type(found) is torch.Tensor


@pytest.mark.parametrize("cast", EVERY_CAST)
def test_out_takes_the_result_in_its_own_strides(cast: str) -> None:
    x = torch.randn(6, 8)
    wanted = quantize(x, cast, seed=3)
    strided = torch.full((8, 6, 2), 5.0)
    for out in (torch.empty(6, 8), torch.empty(8, 6).t(), strided[..., 0].t()):
        assert quantize(x, cast, seed=3, out=out) is out
        assert torch.equal(out, wanted)
    assert (strided[..., 1] == 5).all()


@pytest.mark.parametrize("cast", EVERY_CAST)
def test_in_place_and_overlapping_memory_work(cast: str) -> None:
    x = torch.randn(9, 8)
    wanted = quantize(x[:8], cast, seed=3)
    same = x.clone()[:8]
    version = same._version
    assert quantize(same, cast, seed=3, out=same) is same
    assert torch.equal(same, wanted)
    assert same._version > version  # autograd notices
    transposed = x[:8].clone().t()
    quantize(transposed, cast, seed=3, out=transposed)
    assert torch.equal(transposed, quantize(x[:8].t().contiguous(), cast, seed=3))
    shifted = x.clone()
    quantize(shifted[:8], cast, seed=3, out=shifted[1:])
    assert torch.equal(shifted[1:], wanted)


def test_tensors_are_dense_or_overlap_as_their_addresses_say() -> None:
    base = torch.arange(48.0)
    views = [
        *(base[:24].view(4, 6), base[24:].view(4, 6), base[20:44].view(4, 6), base.view(8, 6)[::2], base[::2]),
        *(base.view(6, 8).t(), base.view(6, 8)[:, :7], base[:6].expand(4, 6), base[:1], base[:0], base.view(2, 3, 8)),
        *(base.view(2, 3, 8).permute(2, 0, 1), base.view(6, 8, 1)[:, :1], base[:2].view(1, 2, 1), base[5]),
    ]
    addresses = [
        [
            one.storage_offset() + sum(i * s for i, s in zip(place, one.stride(), strict=True))
            for place in np.ndindex(*one.shape)
        ]
        for one in views
    ]
    for one, numbers in zip(views, addresses, strict=True):
        is_dense = len({*numbers}) == len(numbers) and (not numbers or max(numbers) - min(numbers) + 1 == len(numbers))
        assert run.is_dense(tuple(one.shape), one.stride()) is is_dense or not one.numel()
        for other, others in zip(views, addresses, strict=True):
            meets = bool(numbers and others) and min(numbers) <= max(others) and min(others) <= max(numbers)
            assert run._overlap(one, other) is meets or not other.numel()
    assert not run._overlap(torch.ones(2), torch.ones(2, device="meta"))


def test_two_tensors_over_one_memory_are_told_from_one_another() -> None:
    array = np.arange(4096, dtype=np.float32) * np.float32(1.001)
    wanted = quantize(array[:-7].copy(), "fp16")
    shifted = array.copy()
    quantize(shifted[:-7], "fp16", out=shifted[7:])
    np.testing.assert_array_equal(shifted[7:], wanted)
    again = array.copy()
    quantize(torch.from_numpy(again[:-7]), "fp16", out=torch.from_numpy(again[7:]))
    np.testing.assert_array_equal(again[7:], wanted)


def test_an_expanded_out_is_refused() -> None:
    with pytest.raises(
        InvalidInput, match=r"out is expanded: several of its elements share one number in memory; give"
    ):
        quantize(torch.ones(3, 4), "fp16", out=torch.zeros(4).expand(3, 4))


def test_a_tensor_without_memory_is_refused_and_zeros_of_autograd_are_zeros() -> None:
    freed = torch.ones(3)
    freed.untyped_storage().resize_(0)
    calls = [
        lambda: quantize(freed, "fp16"),
        lambda: quantize(freed, "mxfp4"),
        lambda: quantize(torch.ones(3), "fp16", out=freed),
        lambda: encode(freed, "fp16"),
        lambda: encode(freed, "int8"),
        lambda: decode(freed.view(torch.uint8), "e4m3fn"),
        lambda: statistics(freed),
    ]
    for implementation in ("bitwise", *(["cpu"] if cpu.library() else [])):
        for call in calls:
            with (
                use(implementation),
                pytest.raises(InvalidInput, match=r"without memory: its storage was resized to 0"),
            ):
                call()
    zeros = torch._efficientzerotensor(3)
    assert quantize(zeros, "e4m3fn").tolist() == [0, 0, 0]
    assert quantize(zeros, "int8").tolist() == [0, 0, 0]
    assert encode(zeros, "e4m3fn").tolist() == [0, 0, 0]
    assert statistics(zeros).zeros == 3


@pytest.mark.parametrize("cast", ["e4m3fn:stochastic", "e8m0:stochastic", "fp16:stochastic-5", "i8:stochastic", "i1"])
def test_pieces_of_a_tensor_draw_the_bits_of_the_whole(cast: str) -> None:
    x = torch.randn(3000) * 3
    x = x.abs() if cast.startswith("e8m0") else x  # which has neither sign nor zero
    if cast == "i1":
        x, cast = x / 20, "binary:stochastic:static(0)"
    for name in (name for name in kernels.available() if name != "native"):
        with use(name):
            wanted = quantize(x, cast, seed=7)
            for first, last in ((0, 5), (5, 1029), (1029, 1030), (1030, 3000)):
                piece = x[first:last]
                found = quantize(piece, cast, seed=7, offset=first)
                assert torch.equal(bits(found), bits(wanted[first:last])), name
                assert np.array_equal(quantize(piece.numpy(), cast, seed=7, offset=np.int64(first)), found)
                followed = quantize(piece.clone().requires_grad_(), cast, seed=torch.tensor(7), offset=first)
                assert torch.equal(followed, found)
                written = torch.empty_like(piece)
                assert torch.equal(quantize(piece, cast, seed=7, offset=first, out=written), found)
                if "static" not in cast:
                    codes = encode(piece, cast, seed=7, offset=first)
                    assert torch.equal(codes, encode(x, cast, seed=7)[first:last])


def test_an_offset_is_an_index() -> None:
    x = torch.ones(3)
    for call in (quantize, encode):
        with pytest.raises(InvalidInput, match=r"offset -1; allowed: 0 to 2\*\*62, the index of x's first element"):
            call(x, "fp16", offset=-1)
        with pytest.raises(TypeError, match=r"offset, the index of x's first element is a whole number, not 0\.5"):
            call(x, "fp16", offset=0.5)


def test_masked_arrays_are_refused() -> None:
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for call in (quantize, encode):
        with pytest.raises(TypeError, match=r"lowp does not support masked arrays: give x\.filled\(0\)"):
            call(masked, "fp16")
    with pytest.raises(TypeError, match=r"or x\.compressed\(\) to lowp\.statistics"):
        statistics(masked)


def test_codes_decode_by_a_cast_in_words() -> None:
    codes = torch.arange(256).to(torch.uint8)
    for cast in ("e4m3fn:saturate", "e4m3fn:stochastic", parse("e4m3fn:up")):
        torch.testing.assert_close(decode(codes, cast), decode(codes, "e4m3fn"), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 0), (0, 3), (5, 1, 2)], ids=str)
def test_any_shape_goes(shape: tuple[int, ...]) -> None:
    x = torch.full(shape, 1.3)
    for cast in (*EVERY_CAST, "mxint8", "nvfp4", "binary", "e4m3fn@fp32/channel"):
        assert quantize(x, cast).shape == shape
    assert encode(x, "fp16").shape == shape
    assert decode(encode(x, "fp16"), "fp16").shape == shape
    assert statistics(x).count == x.numel()


def test_zeros_of_all_dtypes_stay() -> None:
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        x = torch.tensor([0.0, -0.0, 1.0], dtype=dtype)
        found = quantize(x, "e5m2")
        assert found.dtype == dtype
        assert torch.equal(bits(found), bits(x))


# -- NumPy ------------------------------------------------------------------------------------------------------------
def test_numpy_arrays_come_back_as_numpy_arrays() -> None:
    x = np.random.default_rng(0).normal(size=(4, 6))
    read_only = x.astype(np.float32)
    read_only.flags.writeable = False
    arrays = [x, x.astype(np.float32), x.astype(np.float16), x[::-1, ::-2], np.asfortranarray(x), x.astype(">f4")]
    record = np.zeros((4, 6), dtype=[("flag", "i1"), ("value", "f4"), ("rest", "i2")])  # values 7 bytes apart
    record["value"] = x
    shifted = np.zeros(x.nbytes + 1, dtype=np.uint8)[1:].view(np.float64)
    shifted[:] = x.ravel()
    broadcast = np.broadcast_to(x[0], (3, 6))
    for array in [*arrays, read_only, record["value"], shifted, broadcast, x[0, 0], np.float32(1.3), x[:0]]:
        native = np.ascontiguousarray(np.asarray(array).astype(array.dtype.newbyteorder("=")))
        wanted = quantize(torch.from_numpy(native.reshape(array.shape)), "e4m3fn:stochastic", seed=2).numpy()
        found = quantize(array, "e4m3fn:stochastic", seed=2)
        assert isinstance(found, np.ndarray)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(found, wanted)


def test_a_dtype_that_torch_has_not_is_named() -> None:
    for dtype in (np.longdouble, object, ml_dtypes.float8_e4m3fn):
        array = np.ones(2, dtype=dtype)
        with pytest.raises(TypeError, match=f"torch has no dtype for {array.dtype}: convert the array first, for"):
            quantize(array, "fp16")


def test_codes_of_arrays_decode_to_dtypes_of_numpy() -> None:
    codes = encode(np.array([1.5, -0.875], dtype=np.float32), "e4m3fn")
    for dtype in (np.float64, np.float32, "float16", ml_dtypes.bfloat16):
        found = decode(codes, "e4m3fn", dtype=dtype)
        assert found.dtype == dtype
        assert found.astype(np.float32).tolist() == [1.5, -0.875]
    assert decode(codes, "e4m3fn", dtype=torch.float16).dtype == np.float16
    with pytest.raises(TypeError, match=r"NumPy has no bfloat16: use ml_dtypes\.bfloat16, numpy\.float32 or"):
        decode(codes, "e4m3fn", dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"torch has no dtype for .*: use numpy\.float64, float32 or float16"):
        decode(codes, "e4m3fn", dtype=np.dtype("S4"))


def test_a_seed_may_be_an_integer_of_numpy() -> None:
    x = torch.linspace(0, 1, 99)
    for seed in (np.int64(5), np.uint8(5)):
        assert torch.equal(quantize(x, "e4m3fn:stochastic", seed=seed), quantize(x, "e4m3fn:stochastic", seed=5))
        assert torch.equal(encode(x, "e4m3fn:stochastic", seed=seed), encode(x, "e4m3fn:stochastic", seed=5))


def test_a_bfloat16_array_of_ml_dtypes_is_taken() -> None:
    x = np.array([1.3, -0.1, np.nan], dtype=ml_dtypes.bfloat16)
    found = quantize(x, "e4m3fn")
    assert found.dtype == x.dtype
    wanted = x.astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(found.astype(np.float32), wanted.astype(np.float32))


def test_what_hands_out_an_array_is_taken() -> None:
    class Other:
        def asnumpy(self) -> np.ndarray:
            return np.array([1.3], dtype=np.float32)

    np.testing.assert_array_equal(quantize(Other(), "e5m2"), np.array([1.25], dtype=np.float32))


def test_numpy_in_place_and_out() -> None:
    x = np.array([1.3, 2.7], dtype=np.float32)
    assert quantize(x, "e5m2", out=x) is x
    np.testing.assert_array_equal(x, [1.25, 2.5])
    backwards = np.zeros(2, dtype=np.float32)[::-1]
    with pytest.raises(ValueError, match="out is an array that torch cannot write: read-only, byte-swapped"):
        quantize(x, "e5m2", out=backwards)
    with pytest.raises(TypeError, match="out must be an array if x is one, not Tensor"):
        quantize(x, "e5m2", out=torch.zeros(2))


def test_codes_and_statistics_of_arrays() -> None:
    x = np.array([1.5, -2.0, 0.0], dtype=np.float32)
    codes = encode(x, "fp16")
    assert codes.dtype == np.uint16
    np.testing.assert_array_equal(codes, x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(decode(codes, "fp16"), x)
    assert statistics(x).maximum == 2.0


# -- codes ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("format", [f for f in FORMATS_TRIED if f.bits <= 16], ids=str)
@pytest.mark.parametrize("packed", [False, True])
def test_encoding_and_decoding_is_quantizing(format: FloatFormat | IntFormat, packed: bool) -> None:
    x = torch.randn(7, 13, generator=torch.Generator().manual_seed(0)) * 3
    if isinstance(format, FloatFormat) and not format.signed:
        x = x.abs() + 0.01
    codes = encode(x, format, packed=packed)
    if packed and format.bits % 8:
        assert codes.shape == (7, -(-13 * format.bits // 8))
        assert codes.dtype == torch.uint8
    found = decode(codes, format, packed=packed, length=13 if packed else None)
    assert torch.equal(bits(found), bits(quantize(x, format)))


def test_packing_puts_the_first_code_lowest() -> None:
    # e2m1: 1.0 is 0b0010, -6.0 is 0b1111; as torch.float4_e2m1fn_x2, the first is in the low half
    assert encode(torch.tensor([1.0, -6.0, 1.0]), "e2m1", packed=True).tolist() == [0xF2, 0x02]
    assert encode(torch.tensor([1.0, -1.0, -1.0]), "i1", packed=True).tolist() == [0b110]
    assert decode(torch.tensor([0xF2, 0x02], dtype=torch.uint8), "e2m1", packed=True).tolist() == [1.0, -6.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["i1", "i3", "i4", "e2m1", "e3m2"])
def test_codes_of_every_integer_dtype_are_packed_alike(name: str) -> None:
    x = torch.randn(3, 13, generator=torch.Generator().manual_seed(0))
    codes, packed = encode(x, name), encode(x, name, packed=True)
    for dtype in (torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64):
        assert torch.equal(packing.pack(codes.to(dtype), lowp.format(name)), packed)


def test_codes_are_those_of_torch() -> None:
    x = torch.randn(1000)
    for name, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16), ("e5m2", torch.float8_e5m2)):
        codes = encode(x, name)
        same_size = torch.uint8 if dtype.itemsize == 1 else torch.int16
        assert torch.equal(codes.view(same_size), x.to(dtype).view(same_size))
        assert torch.equal(decode(codes, name), x.to(dtype).float())


def test_a_code_needs_no_dtype_that_holds_the_value() -> None:
    assert decode(encode(torch.tensor([65504.0], dtype=torch.float16), "bf16"), "bf16").item() == 65536.0


def test_nan_without_a_code_is_counted() -> None:
    text = "2 of 3 numbers are NaN, which e2m1 has no code for: replace them first"
    with pytest.raises(InvalidInput, match=re.escape(text)):
        encode(torch.tensor([torch.nan, 1.0, torch.nan]), "e2m1")
    assert quantize(torch.tensor([torch.nan]), "e2m1").isnan().all()


# -- statistics -------------------------------------------------------------------------------------------------------
def test_statistics_count_and_merge() -> None:
    x, y = torch.tensor([0.0, -3.0, torch.inf, 1.0]), torch.tensor([[torch.nan, -0.0], [0.5, -torch.inf]])
    both = statistics(x) + statistics(y)
    assert (both.count, both.zeros, both.nan, both.inf, both.nonfinite) == (8, 2, 1, 2, 3)
    assert (both.maximum, both.sum_squares) == (3.0, 10.25)
    assert {i: n for i, n in enumerate(both.exponent_histogram.tolist()) if n} == {0: 2, 126: 1, 127: 1, 128: 1, 255: 3}
    assert repr(both) == "Statistics(count=8, maximum=3, sum_squares=10.25, zeros=2, nan=1, inf=2)"


def test_statistics_of_nothing_and_of_views() -> None:
    nothing = statistics(torch.empty(0))
    assert (nothing.count, nothing.maximum, nothing.sum_squares) == (0, 0.0, 0.0)
    x = torch.randn(6, 8)
    for view in (x.t(), x[:, ::2], x[:1].expand(3, 8)):
        found, wanted = statistics(view), statistics(view.contiguous())
        assert torch.equal(found.exponent_histogram, wanted.exponent_histogram)
        assert found.maximum == wanted.maximum
        assert found.sum_squares == pytest.approx(wanted.sum_squares, rel=48 * 2.0**-53)
    with pytest.raises(TypeError):
        nothing + 1  # type: ignore[operator]


# -- choosing ---------------------------------------------------------------------------------------------------------
def test_use_restores_what_it_saw_on_entry() -> None:
    def chosen() -> str:
        return dispatch.implementation(torch.device("cpu")).__name__.rpartition(".")[2]

    default = chosen()
    with use("reference"):
        inner = use("bitwise")
        with inner:
            assert chosen() == "bitwise"
        with pytest.raises(RuntimeError, match="boom"), use("bitwise"):
            raise RuntimeError("boom")
        assert chosen() == "reference"
        others: list[str] = []
        thread = threading.Thread(target=lambda: others.append(chosen()))
        thread.start()
        thread.join()
        assert others == [default]
    assert chosen() == default


def test_an_unknown_implementation_lists_the_near_ones() -> None:
    text = "unknown implementation 'bitwize'; did you mean bitwise? Also allowed: reference, native, cpu"
    with pytest.raises(UnknownName, match=re.escape(text)):
        use("bitwize")


def test_what_native_lacks_names_who_has_it() -> None:
    with use("native"):
        assert quantize(torch.tensor([1.0 + 2.0**-11]), "fp16").item() == 1.0
        with pytest.raises(Unavailable, match=r"native does not have e4m3fn .* bitwise and reference have it"):
            quantize(torch.ones(1), "e4m3fn")
        with pytest.raises(Unavailable, match=r"native has no statistics; reference, bitwise.* have it"):
            statistics(torch.ones(1))
        with pytest.raises(Unavailable, match=r"native has no encode; reference, bitwise.* have it"):
            encode(torch.ones(1), "fp16")


def test_a_missing_library_is_said_once_and_changes_no_bit() -> None:
    script = """
import pathlib, torch, lowp.kernels.cpu as cpu
cpu.PATH = pathlib.Path("/nowhere/liblowp_cpu.so")
import lowp.kernels as k
x = torch.linspace(-400, 400, 999)
for cast in ("e4m3fn:stochastic", "fp16", "mxfp8"):
    for _ in range(2):
        y = k.quantize(x, cast, seed=4)
    print(hash(tuple(y.tolist())))
print(k.available())
"""
    run = forked.run("-c", script)
    assert run.returncode == 0, run.stderr
    *hashes, names = run.stdout.split("\n", 3)
    x = torch.linspace(-400, 400, 999)
    wanted = [quantize(x, cast, seed=4) for cast in ("e4m3fn:stochastic", "fp16", "mxfp8")]
    assert hashes == [str(hash(tuple(y.tolist()))) for y in wanted]
    assert names.strip() == "('reference', 'bitwise', 'native')"
    assert run.stderr.count("liblowp_cpu.so") == 1, run.stderr


# -- what is refused --------------------------------------------------------------------------------------------------
REFUSED = [
    (dict(x=[1.0], cast="fp16"), TypeError, "lowp takes torch tensors and NumPy arrays, not list"),
    (dict(x=torch.ones(2, dtype=torch.int32), cast="fp16"), TypeError, "lowp rounds tensors of float64, float32,"),
    (dict(x=torch.ones(2, dtype=torch.complex64), cast="fp16"), TypeError, "not torch.complex64: convert first"),
    (dict(x=np.ones(2, dtype=np.int64), cast="fp16"), TypeError, "not torch.int64: convert first"),
    (dict(x=torch.eye(2).to_sparse(), cast="fp16"), TypeError, "lowp takes strided tensors, not torch.sparse_coo"),
    (dict(x=torch.ones(2), cast="bf61"), ValueError, "unknown format 'bf61'; did you mean bf16"),
    (dict(x=torch.ones(2), cast="fp16:nearest"), ValueError, "did you mean nearest-even"),
    (dict(x=torch.ones(2), cast=3), TypeError, "a cast must be text"),
    (
        dict(x=torch.ones(2, dtype=torch.float16), cast="bf16"),
        ValueError,
        "bf16: torch.float16 cannot hold every result",
    ),
    (
        dict(x=torch.ones(2), cast="i32"),
        ValueError,
        "torch.float32 cannot hold every result exactly: convert to float64",
    ),
    (dict(x=torch.ones(2), cast="fp16", seed=1.5), TypeError, "a seed must be an int or a 0-d int64 tensor, not float"),
    (dict(x=torch.ones(2), cast="fp16", seed=torch.ones(2)), TypeError, "not 1-d torch.float32"),
    (dict(x=torch.ones(2), cast="fp16", out=torch.ones(3)), ValueError, "out has shape (3,) and x (2,)"),
    (dict(x=torch.ones(2), cast="fp16", out=torch.ones(2).double()), ValueError, "out has dtype torch.float64 and x"),
    (dict(x=torch.ones(2), cast="fp16", out=torch.ones(2, device="meta")), ValueError, "out has device meta and x cpu"),
    (dict(x=torch.ones(2), cast="fp16", out=[0]), TypeError, "out must be a tensor if x is one, not list"),
    (dict(x=torch.ones(2), cast="fp16", scale=2.0), ValueError, "fp16 has no shared scale"),
    (
        dict(x=torch.ones(2), cast="mxfp8", scale=0.3),
        ValueError,
        "scale 0.3 is not a number of the format of its scale, e8m0",
    ),
    (dict(x=torch.ones(2), cast="int8", scale=0.0), ValueError, "fp32: give positive numbers of that format"),
    (
        dict(x=torch.ones(2), cast="int8", scale=torch.nan),
        ValueError,
        "scale nan is not a number of the format of its scale",
    ),
    (
        dict(x=torch.ones(2), cast="int8-affine", scale=(-1.0, 3)),
        ValueError,
        "scale -1.0 is not a number of the format of its scale",
    ),
    (
        dict(x=torch.ones(2), cast="flex16+5", scale=4.0),
        ValueError,
        "not a number of the format of its scale, 2^-31..0",
    ),
    (dict(x=torch.ones(2), cast="int8", scale=torch.ones(3)), ValueError, "takes one number"),
    (dict(x=torch.ones(2, 3), cast="int8", scale=torch.ones(3)), ValueError, "a tensor (2, 3) takes shape (2,)"),
    (dict(x=torch.ones(2), cast="int8", scale="big"), TypeError, "scale must be a number or a tensor, not str"),
    (dict(x=torch.ones(2), cast="int8-affine", scale=2.0), ValueError, "is affine: give scale=(scale, zero_point)"),
    (
        dict(x=torch.ones(2), cast="nvfp4", scale=2.0),
        ValueError,
        "two levels of scale are always computed from the tensor",
    ),
    (
        dict(x=torch.ones(2), cast="flex16+5:autoflex"),
        ValueError,
        "or lowp.quantize with scale= computed from those tensors",
    ),
]


@pytest.mark.parametrize(("call", "kind", "text"), REFUSED, ids=[text for _, _, text in REFUSED])
def test_what_cannot_be_done_is_refused(call: dict[str, object], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        quantize(call.pop("x"), call.pop("cast"), **call)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("cast", ["fp16", "int8", "mxfp8", "flex16+5"])
def test_nested_tensors_are_refused_in_words_in_every_format(cast: str) -> None:
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)])
    for call in (quantize, encode):
        with pytest.raises(TypeError, match=r"strided tensors, not nested ones: give each of x\.unbind\(\)"):
            call(x, cast)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state:UserWarning")
def test_a_layout_that_refuses_to_say_whether_it_is_contiguous_is_refused() -> None:
    with pytest.raises(TypeError, match=r"lowp takes strided tensors, not torch\.sparse_csr: give x\.to_dense\(\)"):
        quantize(torch.eye(2).to_sparse_csr(), "fp16")


def test_a_given_scale_is_rounded_to_fp32_where_that_is_its_format() -> None:
    x = torch.tensor([1.0, -0.33])
    wanted = quantize(x, "int8", scale=torch.tensor(0.1))
    for scale in (0.1, torch.tensor(0.1, dtype=torch.float64), np.float64(0.1)):
        assert torch.equal(quantize(x, "int8", scale=scale), wanted)
    assert encode(x, "int8", scale=0.1).scale.item() == torch.tensor(0.1).item()


def test_other_functions_refuse_alike() -> None:
    with pytest.raises(TypeError, match=r"not torch\.int64: convert first"):
        statistics(torch.ones(2, dtype=torch.int64))
    with pytest.raises(TypeError, match=r"not torch\.int64: convert first"):
        encode(torch.ones(2, dtype=torch.int64), "fp16")
    with pytest.raises(TypeError, match=r"decode gives tensors of float64, .* bfloat16, not of torch.int32"):
        decode(torch.zeros(2, dtype=torch.uint16), "fp16", dtype=torch.int32)
    with pytest.raises(InvalidInput, match=r"codes of fp16 are torch.uint16, .* not torch.uint8"):
        decode(torch.zeros(2, dtype=torch.uint8), "fp16")
    with pytest.raises(InvalidInput, match=r"fp64: torch.float32 cannot hold every value"):
        decode(torch.zeros(2, dtype=torch.uint64), "fp64")
    with pytest.raises(
        InvalidInput, match=r"mxfp8 needs its scales: give what lowp.encode returned to lowp.dequantize"
    ):
        decode(torch.zeros(2, dtype=torch.uint8), "mxfp8")
    with pytest.raises(InvalidInput, match=r"length is the length of a packed row: give packed=True"):
        decode(torch.zeros(2, dtype=torch.uint8), "e2m1", length=2)
    with pytest.raises(InvalidInput, match=r"a row of 2 bytes holds 4 codes of e2m1, not 5"):
        decode(torch.zeros(2, dtype=torch.uint8), "e2m1", packed=True, length=5)
    with pytest.raises(TypeError, match=r"plain codes go to lowp.decode"):
        kernels.dequantize(torch.zeros(2))  # type: ignore[arg-type]


@pytest.mark.parametrize("format", FORMATS_TRIED, ids=str)
def test_sixteen_bits_hold_what_is_said_to_fit(format: FloatFormat | IntFormat) -> None:
    every = torch.arange(-(1 << 15), 1 << 15).to(torch.int16)
    for dtype in (torch.float16, torch.bfloat16):
        x = every.view(dtype)
        for text in (f"{format}", f"{format}:up"):
            wide = quantize(x.double(), text)
            fits = bool(((wide.to(dtype).double() == wide) | wide.isnan()).all())
            assert kernels.casts.checks.holds(parse(text), dtype) == fits
            if fits:
                assert torch.equal(quantize(x, text).double().nan_to_num(), wide.nan_to_num())


def test_what_a_draw_may_give_must_fit_whatever_is_drawn() -> None:
    # 65504 is rounded to 57344 or to 65536, which fp16 does not hold
    x = torch.tensor([65504.0], dtype=torch.float16)
    assert quantize(x, "e6m2:toward-zero").item() == 57344.0
    for rounding in ("stochastic", "stochastic-8", "up", "nearest-even"):
        with pytest.raises(InvalidInput, match=r"torch\.float16 cannot hold every result exactly"):
            quantize(x, f"e6m2:{rounding}")


# -- the shortest way -------------------------------------------------------------------------------------------------
def test_a_plain_call_asks_torch_for_its_result_s_memory_and_nothing_else() -> None:
    if "cpu" not in kernels.available():
        pytest.skip("without the C++ library torch operations do the work")
    x = torch.randn(1000)
    quantize(x, "e4m3fn")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        quantize(x, "e4m3fn")
    asked = {event.key for event in profile.key_averages() if event.key.startswith(("aten::", "lowp::"))}
    assert asked <= {"aten::empty_like", "aten::empty_strided", "aten::empty"}


def test_statistics_are_a_value() -> None:
    assert isinstance(statistics(torch.ones(3)), Statistics)


@pytest.mark.parametrize("bits", [8, 16, 32, 64])
def test_codes_of_every_dtype_are_whole_numbers_with_their_low_bits(bits: int) -> None:
    unsigned, signed = getattr(torch, f"uint{bits}"), getattr(torch, f"int{bits}")
    top = 1 << (bits - 1)
    codes = torch.tensor([0, 1, -1, -top], dtype=signed)
    assert packing.as_integers(codes).tolist() == [0, 1, -1, -top]
    found = packing.as_integers(codes.view(unsigned)).tolist()
    assert found == ([0, 1, 2 * top - 1, top] if bits < 64 else [0, 1, -1, -top])


@pytest.mark.parametrize("seed", [-(2**63), 2**63 - 1, 2**63, 2**64 - 1, -(2**63) - 1])
def test_operators_take_seeds_modulo_64_bits(seed: int) -> None:
    x = torch.rand(64)
    (*_, given, _, _) = verbs.arguments(x, "e4m3fn:stochastic", None, seed, 0)
    assert given == (seed + 2**63) % 2**64 - 2**63
    found = torch.ops.lowp.quantize(x, *verbs.arguments(x, "e4m3fn:stochastic", None, seed, 0))
    assert torch.equal(found, quantize(x, "e4m3fn:stochastic", seed=seed))


@pytest.mark.parametrize("to", ["e2m1", "e3m2", "e4m3fn", "i4"])
@pytest.mark.parametrize("shape", [(2, 3, 5), (2, 8), (7,), ()])
def test_shapes_and_dtypes_of_codes_are_known_before_these_are_computed(to: str, shape: tuple[int, ...]) -> None:
    x = torch.rand(shape)
    for packed in (False, True):
        codes, fake = (torch.ops.lowp.encode(one, to, 0, None, 0, packed) for one in (x, x.to("meta")))
        assert (fake.shape, fake.dtype) == (codes.shape, codes.dtype)
        for length in (None, *shape[-1:]) if packed else (None,):
            given = to, torch.float64, packed, length
            values, fake = (torch.ops.lowp.decode(one, *given) for one in (codes, codes.to("meta")))
            assert (fake.shape, fake.dtype) == (values.shape, values.dtype)


@pytest.mark.parametrize("cast", ["mxfp4", "nvfp4", "int8", "int8-affine", "e2m1@e8m0/tensor"])
@pytest.mark.parametrize("packed", [False, True])
def test_shapes_of_values_under_scales_are_known_before_these_are_computed(cast: str, packed: bool) -> None:
    q = encode(torch.rand(3, 35), cast, packed=packed)
    parts = q.payload, q.scale, q.outer, q.zero_point
    for dtype in (torch.float32, torch.float64):
        given = q.cast.text, dtype, q.length
        values = torch.ops.lowp.decode_scaled(*parts, *given)
        fake = torch.ops.lowp.decode_scaled(*(None if one is None else one.to("meta") for one in parts), *given)
        assert (fake.shape, fake.dtype) == (values.shape, values.dtype) == ((3, 35), dtype)


def test_statistics_are_of_the_elements_alone_however_they_lie() -> None:
    whole = torch.arange(1.0, 121.0).view(2, 3, 20)
    for x in (whole, whole.permute(2, 0, 1), whole[:, :, ::2], whole[:, 1:2, 3:9], whole[0].t()[::3], whole[:1, 0, 5]):
        found = statistics(x)
        assert found.maximum == x.max() and found.count == x.numel()
        assert float(found.extremes[1]) == float((x.double() ** 2).sum())


def test_operators_over_a_batch_are_those_of_its_examples() -> None:
    x = torch.randn(3, 4, 6)
    for dim in (0, 1, -1):
        examples = x.unbind(dim)
        for packed in (False, True):
            wanted = torch.stack([torch.ops.lowp.encode(one, "e2m1", 0, None, 0, packed) for one in examples])
            found = torch.vmap(lambda one: torch.ops.lowp.encode(one, "e2m1", 0, None, 0, packed), dim)(x)  # noqa: B023
            assert torch.equal(found, wanted)
            values = torch.stack([torch.ops.lowp.decode(one, "e2m1", torch.float32, packed, None) for one in wanted])
            found = torch.vmap(lambda one: torch.ops.lowp.decode(one, "e2m1", torch.float32, packed, None))(wanted)  # noqa: B023
            assert torch.equal(found, values)
        found = torch.vmap(torch.ops.lowp.statistics, dim)(x)
        for one, each in zip(found, zip(*map(torch.ops.lowp.statistics, examples), strict=True), strict=True):
            assert torch.equal(one, torch.stack(each))


def test_numbers_that_stand_alone_are_packed_alone_in_a_batch() -> None:
    x, call = torch.tensor([1.0, -2.0, 3.0]), torch.ops.lowp.encode
    assert torch.vmap(lambda one: call(one, "e2m1", 0, None, 0, True))(x).tolist() == [[2], [12], [5]]
    assert torch.vmap(lambda one: call(one, "e2m1", 0, None, 0, False))(x).tolist() == [2, 12, 5]
    codes, decoded = torch.tensor([2, 12, 5], dtype=torch.uint8), torch.ops.lowp.decode
    assert torch.vmap(lambda one: decoded(one, "e2m1", torch.float32, False, None))(codes).tolist() == [1, -2, 3]


@pytest.mark.parametrize(
    ("cast", "packed", "calls"),
    [("e2m1", False, 1), ("e2m1", True, 1), ("e2m1:stochastic", False, 4), ("mxfp4", False, 4)],
)
def test_a_batch_is_cast_at_once_where_its_examples_are_cast_alike(
    cast: str, packed: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[torch.Size] = []

    def noted(module: Any, x: Tensor, *given: Any, inner: Any = None) -> Any:
        made.append(x.shape)
        return inner(module, x, *given)

    for name in ("quantize", "encode", "decode", "decode_packed"):
        monkeypatch.setattr(run, name, functools.partial(noted, inner=getattr(run, name)))
    x = torch.randn(4, 32)
    torch.vmap(lambda one: torch.ops.lowp.quantize(one, cast, None, None, 0, None, 0))(x)
    assert made == [x.shape] if calls == 1 else len(made) == calls
    if parse(cast).scaling is None:
        made.clear()
        codes = torch.vmap(lambda one: torch.ops.lowp.encode(one, cast, 0, None, 0, packed))(x)
        assert len(made) == calls
        made.clear()
        torch.vmap(lambda one: torch.ops.lowp.decode(one, "e2m1", torch.float32, packed, None))(codes)
        assert made[0] == codes.shape


WRITTEN = {  # what a result is written into, given what is read; whether the library writes there itself
    "itself": (lambda x, beside: x, True),
    "beside it": (lambda x, beside: beside, True),
    "over its end": (lambda x, beside: beside.as_strided((64,), (1,), 32), False),
    "a parameter": (lambda x, beside: torch.nn.Parameter(torch.empty(64), requires_grad=False), True),
    "with gaps": (lambda x, beside: torch.empty(64, 2)[:, 0], False),
    "another shape": (lambda x, beside: torch.empty(8, 8), False),
}


@pytest.mark.parametrize("place", WRITTEN)
@pytest.mark.parametrize("cast", ["e4m3fn", "mxfp8"])
def test_a_result_is_written_at_once_where_its_memory_is_plain(
    place: str, cast: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not dispatch.uses_library():
        return
    made: list[str] = []
    inner = verbs.DIRECT.quantize_out
    monkeypatch.setattr(verbs.DIRECT, "quantize_out", lambda *given: (made.append(place), inner(*given)))
    monkeypatch.setattr(verbs, "quantized", None)  # nothing here is an operator's
    for first in (0, 64):  # `beside` comes after it or before it
        memory = torch.randn(128)
        x, beside = memory[first : first + 64], memory[64 - first : 128 - first]
        x_before, (out, is_direct) = x.clone(), (WRITTEN[place][0](x, beside), WRITTEN[place][1])
        made.clear()
        if place == "another shape":
            with pytest.raises(InvalidInput, match=r"out has shape \(8, 8\) and x \(64,\)"):
                quantize(x, cast, out=out)
            continue
        assert quantize(x, cast, out=out) is out and torch.equal(out, quantize(x_before, cast))
        assert bool(made) is not is_direct


@pytest.mark.parametrize(
    ("cast", "dtype", "number"), [("mxfp4:ceil", torch.float16, 65504.0), ("mxfp8:rceil", torch.bfloat16, 3.38e38)]
)
def test_what_sixteen_bits_do_not_hold_is_refused_before_anything_is_written(
    cast: str, dtype: torch.dtype, number: float
) -> None:
    x = torch.full((96,), number, dtype=dtype)
    x[:32] = 1.01
    for out in (x, torch.ones_like(x)):
        before = out.clone()
        with pytest.raises(InvalidInput, match=r"cannot hold every result exactly"):
            quantize(x, cast, out=out)
        assert torch.equal(out, before)


BINADES = [  # cast, the exponents of the smallest and of the largest scale
    ("i8@e8m0/tensor", -127, 127),
    ("mxfp8", -127, 127),
    ("flex16+5", -31, 0),
]


@pytest.mark.parametrize(("cast", "lowest", "highest"), BINADES)
def test_a_given_power_of_two_is_a_scale_from_the_smallest_to_the_largest(cast: str, lowest: int, highest: int) -> None:
    x = torch.ones(2, dtype=torch.float64)
    for exponent in (lowest, highest):
        assert encode(x, cast, scale=2.0**exponent).scale.isfinite().all()
    beyond = [2.0 ** (lowest - 1), 2.0 ** (highest + 1), 1.5 * 2.0**highest, 0.75 * 2.0**highest]
    for scale in (*beyond, 0.0, -(2.0**lowest), math.inf, -math.inf, 5e-324):
        with pytest.raises(InvalidInput, match=r"is not a number of the format of its scale"):
            encode(x, cast, scale=scale)


def test_a_given_zero_point_is_a_number_of_the_elements() -> None:
    x = torch.tensor([0.0, 1.0])
    for zero_point in (-128, 127):
        assert quantize(x, "int8-affine", scale=(1.0, zero_point))[0] == 0
    for zero_point in (-129, 128):
        with pytest.raises(InvalidInput, match=rf"zero point {zero_point} is not a number of i8: .* from -128 to 127"):
            quantize(x, "int8-affine", scale=(1.0, zero_point))


STRANGE = {  # scales that are no strided tensors of real numbers
    "strided torch.float32": lambda: torch.ones((), device="meta"),
    "sparse_coo torch.float32": lambda: torch.ones(1).to_sparse(),
    "strided torch.complex64": lambda: torch.ones((), dtype=torch.complex64),
}


@pytest.mark.parametrize("said", STRANGE)
def test_a_scale_is_a_strided_tensor_of_real_numbers(said: str) -> None:
    with pytest.raises(TypeError, match=rf"scale must be a strided tensor of real numbers, not torch\.{said}"):
        quantize(torch.ones(2), "int8", scale=STRANGE[said]())


@pytest.mark.parametrize("seed", [torch.ones((), dtype=torch.int32), torch.ones(1, dtype=torch.int64)], ids=str)
def test_a_seed_in_a_tensor_is_one_number_of_64_bits(seed: Tensor) -> None:
    with pytest.raises(TypeError, match=f"a seed must be an int or a 0-d int64 tensor, not {seed.ndim}-d {seed.dtype}"):
        quantize(torch.ones(2), "fp16:stochastic", seed=seed)


HELD = {  # casts of fp32 numbers, and whether fp32 holds every result
    **{"i25": True, "i26": False, "i25s": True, "fp64": True, "e9m23": True, "e8m24": True},
    **{"e11m20": False, "e4m30": False, "fp64:saturate": False, "e9m23:saturate": False},
}


@pytest.mark.parametrize(("cast", "is_held"), HELD.items())
def test_fp32_holds_what_a_cast_makes_of_its_numbers_or_the_cast_is_refused(cast: str, is_held: bool) -> None:
    x = torch.tensor([1.0, -3.0, 2.0**23 + 1, 0.0])
    if is_held:
        assert torch.equal(quantize(x, cast), quantize(x.double(), cast).float())
        assert torch.equal(quantize(x.double(), cast), quantize(x.double(), cast).float().double())
        return
    with pytest.raises(InvalidInput, match=r"torch\.float32 cannot hold every result exactly: convert to float64"):
        quantize(x, cast)


@pytest.mark.parametrize(("cast", "dtype"), [("i9", torch.bfloat16), ("i12", torch.float16)])
def test_sixteen_bits_hold_the_digits_of_integers_under_a_power_of_two(cast: str, dtype: torch.dtype) -> None:
    bits = int(cast[1:])
    x = torch.tensor([1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1, 3], dtype=dtype)
    assert torch.equal(quantize(x, f"{cast}@e8m0/tensor", scale=1.0), x)
    with pytest.raises(InvalidInput, match=rf"{dtype} cannot hold every result"):
        quantize(x, f"i{bits + 1}@e8m0/tensor", scale=1.0)
    codes = torch.arange(-4, 4).to(torch.int16)
    assert decode(codes, cast, dtype=dtype).tolist() == list(range(-4, 4))
    with pytest.raises(InvalidInput, match=rf"{dtype} cannot hold every value"):
        decode(codes, f"i{bits + 1}", dtype=dtype)


def test_an_array_whose_elements_are_one_number_is_an_expanded_out() -> None:
    out = np.lib.stride_tricks.as_strided(np.zeros(1, dtype=np.float32), (4,), (0,))
    with pytest.raises(InvalidInput, match=r"out is expanded"):
        quantize(np.ones(4, dtype=np.float32), "fp16", out=out)
