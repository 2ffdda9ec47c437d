"""torch sees a cast as one operator: compilers keep it, gradients and transforms pass through it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch
from exact_casts import bits, inputs
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

from lowp.casts import Cast, parse
from lowp.compat import COMPILES_REGIONS
from lowp.errors import InvalidInput
from lowp.kernels import decode, dequantize, encode, quantize, statistics, use
from lowp.kernels.casts.functions import quantize_operand
from lowp.kernels.numbers import bitwise
from lowp.quantized import Quantized

# torch's own compiler and forward derivatives, when first used
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

CASTS = ["fp16", "bf16", "e4m3fn", "e4m3fn:stochastic", "mxfp4", "int8"]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def compiled(function: Callable[..., object], backend: str = "inductor", **options: bool) -> Callable[..., object]:
    return torch.compile(function, fullgraph=True, backend=backend, **options)  # type: ignore[call-overload]


def graphs(found: list[int]) -> Callable[..., object]:
    """Return a backend that counts the graphs it is given."""

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Callable[..., object]:
        found.append(len(graph.graph.nodes))
        return graph.forward

    return backend


# -- compile ----------------------------------------------------------------------------------------------------------
DELETED = ("fp16", "bf16")  # there and back by torch's dtypes is (pytorch issues 185337 and 176565)


@pytest.fixture(scope="module")
def inductors() -> tuple[Tensor, list[Tensor]]:
    """Return numbers and the results of inductor's code for the casts DELETED and the arithmetic of the first.

    They are built together once, which takes ten seconds."""
    first = parse(DELETED[0])
    x = torch.cat([inputs(parse(text).element, torch.float32, random=1000) for text in DELETED])
    prepared = bitwise.parameters(first, x.dtype)
    run = compiled(lambda x: [*(quantize(x, text) * 1.0 for text in DELETED), bitwise.apply(x, first, prepared)])
    return x, run(x)  # type: ignore[return-value]


def test_inductor_does_not_delete_a_cast(inductors: tuple[Tensor, list[Tensor]]) -> None:
    x, both = inductors
    for text, found in zip(DELETED, both[:2], strict=True):
        wanted = quantize(x, text)
        assert torch.equal(bits(found), bits(wanted * 1.0))
        assert not torch.equal(wanted.nan_to_num(), x.nan_to_num())


@pytest.mark.parametrize("text", CASTS)
def test_one_graph_gives_the_eager_bits(text: str) -> None:
    x = torch.randn(6, 40)
    for given in (text, parse(text)) if COMPILES_REGIONS else (text,):  # earlier compilers take no objects
        found = compiled(lambda x, given=given: quantize(x + 1, given, seed=5).sin(), backend="aot_eager")(x)
        assert torch.equal(found, quantize(x + 1, text, seed=5).sin())  # type: ignore[arg-type]


def test_shapes_may_be_dynamic() -> None:
    count: list[int] = []
    function = torch.compile(lambda x: quantize(x, "e5m2") + 1, backend=graphs(count), fullgraph=True, dynamic=True)
    for length in (3, 8, 21):
        x = torch.randn(length, 2)
        assert torch.equal(function(x), quantize(x, "e5m2") + 1)
    assert len(count) == 1


def test_a_seed_does_not_recompile() -> None:
    x, count = torch.randn(50), []
    function = torch.compile(
        lambda x, seed: quantize(x, "e4m3fn:stochastic", seed=seed) + 0, backend=graphs(count), fullgraph=True
    )
    for seed in range(4):
        tensor = torch.tensor(seed)
        assert torch.equal(function(x, tensor), quantize(x, "e4m3fn:stochastic", seed=seed))
    assert len(count) == 1
    for seed in range(2, 7):
        assert torch.equal(function(x, seed), quantize(x, "e4m3fn:stochastic", seed=seed))
    assert len(count) <= 3  # once as a constant, once as a symbol


def test_an_offset_compiles() -> None:
    x = torch.randn(40)
    for cast in ("e4m3fn:stochastic", "int8:stochastic"):
        found = compiled(lambda x, cast=cast: quantize(x, cast, seed=3, offset=17) + 0, "aot_eager")(x)
        assert torch.equal(found, quantize(x, cast, seed=3, offset=17))  # type: ignore[arg-type]


def test_seeds_of_64_bits_pass_through_the_operator() -> None:
    x = torch.rand(99, requires_grad=True)
    for seed in (2**63, 2**63 + 5, 2**64 - 1, -1, -(2**63)):
        wanted = quantize(x.detach(), "e4m3fn:stochastic", seed=seed)
        assert torch.equal(quantize(x, "e4m3fn:stochastic", seed=seed), wanted)


def test_in_place_and_given_scales_compile() -> None:
    def function(x: Tensor, scale: Tensor) -> Tensor:
        y = x * 2
        quantize(y, "e5m2", out=y)
        return quantize(y, "int8", scale=scale) + quantize(y, "flex16+5", scale=2.0**-8)

    x, scale = torch.randn(4, 8), torch.full((4,), 0.25)
    assert torch.equal(compiled(function, "aot_eager")(x, scale), function(x, scale))  # type: ignore[arg-type]


def test_codes_and_statistics_compile() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = statistics(x)
        codes = encode(x, "e2m1", packed=True)
        return found.exponent_histogram, codes, decode(codes, "e2m1", packed=True, length=7)

    x = torch.randn(3, 7)
    for found, wanted in zip(compiled(function, "aot_eager")(x), function(x), strict=True):  # type: ignore[call-overload]
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "int8", "int8-affine", "flex16+5"])
@pytest.mark.parametrize("packed", [False, True])
def test_codes_under_a_shared_scale_compile_and_batch(text: str, packed: bool) -> None:
    def function(x: Tensor) -> Quantized:
        return encode(x, text, packed=packed)  # type: ignore[no-any-return]

    def tensors(q: Quantized) -> list[Tensor]:
        return [one for one in (q.payload, q.scale, q.outer, q.zero_point) if one is not None]

    x = torch.randn(4, 20)
    found, wanted = compiled(function, "aot_eager")(x), function(x)
    assert isinstance(found, Quantized)
    assert (found.cast, found.length, found.dtype) == (wanted.cast, wanted.length, wanted.dtype)
    assert all(torch.equal(*pair) for pair in zip(tensors(found), tensors(wanted), strict=True))
    batched = torch.func.vmap(lambda x: tuple(tensors(function(x))))(x)
    assert all(map(torch.equal, batched, map(torch.stack, zip(*(tensors(function(one)) for one in x), strict=True))))


def test_the_arithmetic_itself_compiles_to_the_same_bits(inductors: tuple[Tensor, list[Tensor]]) -> None:
    x, (*_, found) = inductors
    assert torch.equal(bits(found), bits(bitwise.quantized(x, parse(DELETED[0]))))


@pytest.mark.parametrize("text", ["mxfp4", "nvfp4", "int8-affine", "flex16+5"])
def test_values_of_codes_under_a_shared_scale_compile_and_batch(text: str) -> None:
    def function(x: Tensor) -> Tensor:
        return dequantize(encode(x, text, packed=True)) * 2

    x = torch.randn(4, 21)
    assert torch.equal(compiled(function, "aot_eager")(x), function(x))  # type: ignore[arg-type]
    assert torch.equal(torch.func.vmap(function)(x), torch.stack([function(one) for one in x]))
    given = encode(x, text)
    assert torch.equal(compiled(dequantize, "aot_eager")(given), dequantize(given))  # type: ignore[arg-type]


def test_a_cast_under_scales_of_a_leading_dimension_keeps_the_strides_that_a_compiler_expects() -> None:
    x = torch.randn(2, 32, 3)
    for given in (x, x.transpose(1, 2)):
        assert quantize_operand(given, parse("mxfp8"), 0, True, axis=1).stride() == given.stride()


@pytest.mark.slow
def test_so_does_that_in_64_bits() -> None:
    cast = parse("e8m0")
    x = inputs(cast.element, torch.float32, random=2000)
    prepared = bitwise.parameters(cast, x.dtype)
    found = compiled(lambda x: bitwise.apply(x, cast, prepared))(x)
    assert torch.equal(bits(found), bits(bitwise.quantized(x, cast)))  # type: ignore[arg-type]


def test_gradients_pass_through_a_compiled_cast() -> None:
    x = torch.randn(8, requires_grad=True)
    compiled(lambda x: (quantize(x * 3, "e4m3fn") * 2).sum(), "aot_eager")(x).backward()  # type: ignore[attr-defined]
    assert torch.equal(x.grad, torch.full((8,), 6.0))


def test_use_reaches_into_compiled_code() -> None:
    function = compiled(lambda x: quantize(x, "e4m3fn") + 0, backend="eager")
    x = torch.randn(4)
    function(x)
    with use("native"), pytest.raises(RuntimeError, match=r"native does not have e4m3fn"):
        function(x)


# -- gradients --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("text", CASTS)
def test_the_gradient_is_passed_on_unchanged(text: str) -> None:
    x = torch.randn(3, 40, requires_grad=True)
    y = quantize(x, text)
    assert torch.equal(y, quantize(x.detach(), text))
    gradient = torch.randn(3, 40)
    y.backward(gradient)
    assert torch.equal(x.grad, gradient)


def test_the_second_derivative_is_that_of_the_rest() -> None:
    x = torch.tensor([1.3, -2.0], requires_grad=True)
    (first,) = torch.autograd.grad((quantize(x, "e5m2") ** 3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    assert torch.equal(second, 6 * quantize(x.detach(), "e5m2"))


def test_in_place_on_what_requires_grad_is_refused() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        quantize(leaf, "fp16", out=leaf)
    with pytest.raises(RuntimeError, match="quantize with out= has no gradient"):
        quantize(leaf, "fp16", out=torch.empty(3))
    with torch.no_grad():
        assert quantize(leaf, "fp16", out=leaf) is leaf


def test_autograd_notices_an_overwritten_tensor() -> None:
    x = torch.ones(3, requires_grad=True)
    hidden = x.exp()
    quantize(hidden.detach(), "e5m2", out=hidden.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        hidden.sum().backward()


def test_inference_mode_works() -> None:
    with torch.inference_mode():
        x = torch.full((3,), 1.3)
        assert quantize(x, "e5m2").tolist() == [1.25] * 3
        assert quantize(x, "e5m2", out=x).tolist() == [1.25] * 3


# -- torch.func -------------------------------------------------------------------------------------------------------
def test_func_transforms_go_straight_through() -> None:
    x, tangent = torch.randn(5), torch.randn(5)

    def loss(x: Tensor) -> Tensor:
        return (quantize(x, "e4m3fn") ** 2).sum()

    gradient = 2 * quantize(x, "e4m3fn")
    assert torch.equal(torch.func.grad(loss)(x), gradient)
    value, derivative = torch.func.jvp(loss, (x,), (tangent,))
    assert torch.equal(value, loss(x))
    assert torch.allclose(derivative, gradient @ tangent)
    assert torch.equal(torch.func.hessian(loss)(x), 2 * torch.eye(5))
    per_example = torch.func.vmap(torch.func.grad(loss))(torch.stack((x, tangent)))
    assert torch.equal(per_example, 2 * quantize(torch.stack((x, tangent)), "e4m3fn"))


@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("text", CASTS)
def test_what_outlives_a_transform_is_cast_as_what_it_wraps(text: str, levels: int) -> None:
    left: list[Tensor] = []

    def kept(x: Tensor) -> Tensor:
        left.append(x * 1.0)
        return (x * x).sum()

    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2))
    function = kept if levels == 1 else lambda x: torch.func.grad(kept)(x).sum()
    torch.func.grad(function)(x)
    assert torch.equal(quantize(left[0], text, seed=3), quantize(x, text, seed=3))
    codes, wanted = encode(left[0], text, seed=3), encode(x, text, seed=3)
    assert torch.equal(*(one.payload if isinstance(one, Quantized) else one for one in (codes, wanted)))
    assert torch.equal(statistics(left[0]).exponent_histogram, statistics(x).exponent_histogram)


def test_dual_numbers_keep_their_tangents() -> None:
    x, tangent = torch.randn(5), torch.randn(5)
    with forward_ad.dual_level():
        value, derivative = forward_ad.unpack_dual(quantize(forward_ad.make_dual(x, tangent), "e4m3fn"))
    assert torch.equal(value, quantize(x, "e4m3fn"))
    assert torch.equal(derivative, tangent)


@pytest.mark.parametrize("text", [*CASTS, "flex16+5", "nvfp4"])
@pytest.mark.parametrize("dimension", [0, 1])
def test_vmap_is_the_loop(text: str, dimension: int) -> None:
    x = torch.randn(4, 4, 20)
    found = torch.func.vmap(lambda x: quantize(x, text, seed=9), in_dims=dimension)(x)
    assert torch.equal(found, torch.stack([quantize(each, text, seed=9) for each in x.unbind(dimension)]))


def test_a_scale_that_a_format_has_not_is_refused_under_vmap_too() -> None:
    x = torch.randn(3, 4)
    for call in (quantize, encode):
        with pytest.raises(InvalidInput, match="bf16 has no shared scale for scale="):
            torch.func.vmap(lambda one, call=call: call(one, "bf16", scale=2.0))(x)


def test_vmap_over_seeds_and_scales() -> None:
    x, seeds, scales = torch.randn(20), torch.arange(3), torch.tensor([0.5, 0.25, 1.0])
    found = torch.func.vmap(lambda seed: quantize(x, "e4m3fn:stochastic", seed=seed))(seeds)
    assert torch.equal(found, torch.stack([quantize(x, "e4m3fn:stochastic", seed=s) for s in range(3)]))
    found = torch.func.vmap(lambda scale: quantize(x, "int8", scale=scale))(scales)
    assert torch.equal(found, torch.stack([quantize(x, "int8", scale=scale) for scale in scales]))


@pytest.mark.parametrize("dimension", [0, 1])
def test_vmap_of_codes_and_statistics_is_the_loop(dimension: int) -> None:
    x = torch.randn(4, 4, 7)
    for text in ("e4m3fn", "e2m1:stochastic"):
        for packed in (False, True):
            call = functools.partial(encode, cast=text, seed=3, packed=packed)
            found = torch.func.vmap(call, in_dims=dimension)(x)
            assert torch.equal(found, torch.stack([call(each) for each in x.unbind(dimension)]))
    alone = torch.func.vmap(lambda x: encode(x, "e2m1", packed=True))(x[0, 0])
    assert torch.equal(alone, torch.stack([encode(one, "e2m1", packed=True) for one in x[0, 0]]))
    for text, packed in (("e4m3fn", False), ("e2m1", True)):
        codes = encode(x.movedim(dimension, 0).contiguous(), text, packed=packed)
        back = torch.func.vmap(functools.partial(decode, format=text, packed=packed, length=7 if packed else None))
        assert torch.equal(back(codes), decode(codes, text, packed=packed, length=7 if packed else None))
    found = torch.func.vmap(lambda x: statistics(x).exponent_histogram, in_dims=dimension)(x)
    assert torch.equal(found, torch.stack([statistics(each).exponent_histogram for each in x.unbind(dimension)]))


def in_place(x: Tensor) -> Tensor:
    y = x * 2
    quantize(y, "e4m3fn", out=y)
    return y + 1


def test_transforms_see_what_is_written_in_place() -> None:
    x = torch.randn(4, 5)
    assert torch.equal(torch.func.vmap(in_place)(x), in_place(x))
    for function in (in_place, lambda x: quantize(x, "e4m3fn"), lambda x: encode(x, "e4m3fn")):
        assert torch.equal(torch.func.functionalize(function)(x), function(x))


# -- other ways that torch looks at a call ----------------------------------------------------------------------------
def test_fake_and_meta_tensors_have_the_shape() -> None:
    for text in CASTS:
        assert quantize(torch.empty(2, 40, device="meta"), text).shape == (2, 40)
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(2, 7)
        assert quantize(x, "mxfp4").shape == (2, 7)
        assert encode(x, "e2m1", packed=True).shape == (2, 4)
        assert statistics(x).exponent_histogram.shape == (256,)


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: quantize(x * 2, "e4m3fn") + 0,
        lambda x: quantize(x, "mxfp4"),
        lambda x: decode(encode(x, "e4m3fn"), "e4m3fn"),
        lambda x: statistics(x).exponent_histogram,
        in_place,
    ],
)
def test_a_traced_script_computes_with_what_it_is_given(function: Callable[[Tensor], Tensor]) -> None:
    traced = torch.jit.trace(function, (torch.ones(5),))
    x = torch.randn(5)
    assert torch.equal(traced(x), function(x))


def test_a_trace_shows_the_operator() -> None:
    graph = make_fx(lambda x: quantize(x, "e4m3fn"))(torch.randn(3)).graph
    assert "lowp.quantize" in str(graph)


def test_a_dispatch_mode_sees_the_operator() -> None:
    seen: list[str] = []

    class Audit(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    x = torch.randn(3)
    with Audit():
        assert torch.equal(quantize(x, "e4m3fn"), quantize(x, "e4m3fn"))
    assert "lowp.quantize.default" in seen


def _of(q: Quantized) -> tuple[Tensor | None, ...]:
    return q.payload, q.scale, q.outer, q.zero_point


def test_operators_keep_the_rules_of_torch() -> None:
    x = torch.randn(3, 4, requires_grad=True)
    arguments = (x, str(Cast(parse("e4m3fn").format)), None, None, 0, None, 0)
    results = torch.library.opcheck(torch.ops.lowp.quantize.default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    out = (x.detach(), "fp16", None, None, 0, None, 0, torch.empty(3, 4))
    assert set(torch.library.opcheck(torch.ops.lowp.quantize_out.default, out).values()) == {"SUCCESS"}
    for operator, call in (
        (torch.ops.lowp.encode.default, (x.detach(), "e2m1", 0, None, 0, True)),
        (torch.ops.lowp.decode.default, (torch.zeros(3, 4, dtype=torch.uint8), "e2m1", torch.float32, True, 7)),
        (torch.ops.lowp.statistics.default, (x.detach(),)),
        (torch.ops.lowp.encode_scaled.default, (x.detach(), "nvfp4", None, None, 0, None, 0, True)),
        (torch.ops.lowp.encode_scaled.default, (x.detach(), "int8-affine", None, None, 0, None, 0, False)),
        (torch.ops.lowp.decode_scaled.default, (*_of(encode(x.detach(), "nvfp4")), "nvfp4", torch.float32, None)),
    ):
        assert set(torch.library.opcheck(operator, call).values()) == {"SUCCESS"}, operator


def test_a_gradient_reaches_what_is_negated_lazily() -> None:
    parts = torch.randn(4, dtype=torch.complex64, requires_grad=True)
    negated = parts.conj().imag
    assert negated.is_neg()
    quantize(negated, "e4m3fn").sum().backward()
    assert torch.equal(parts.grad, torch.full((4,), -1j))
