"""Steps of optimizers and checks of gradients in one launch, in Triton's interpreter: the bits of the definition."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import lowp
from lowp import kernels
from lowp.casts import parse
from lowp.errors import Unavailable
from lowp.kernels.steps import updates
from lowp.optim import SGD, AdamW, Lion

steps = pytest.importorskip("lowp.kernels.triton.steps", reason="triton is not installed")

MAKES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "adamw": (lambda p, **k: AdamW(p, lr=1e-2, **k), lambda p: torch.optim.AdamW(p, lr=1e-2)),
    "adamw, far end": (
        lambda p, **k: AdamW(p, lr=1e-2, betas=(0.4, 0.9), maximize=True, **k),
        lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.4, 0.9), maximize=True),
    ),
    "sgd": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3, nesterov=True),
    ),
    "sgd, damped": (
        lambda p, **k: SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True, **k),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, maximize=True),
    ),
    "sgd, plain": (lambda p, **k: SGD(p, lr=0.1, **k), lambda p: torch.optim.SGD(p, lr=0.1)),
}
SHAPES = ((3, 5), (70,), (), (0,), (4, 3, 2, 2))


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def give(ours: list[nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in ours:
        parameter.grad = torch.randn(parameter.shape, generator=generator).bfloat16().to(parameter.dtype)


@pytest.mark.parametrize("name", MAKES)
def test_every_storage_gives_the_same_bits_and_torchs_numbers(name: str) -> None:
    make, torchs = MAKES[name]
    wanted = parameters()
    theirs = torchs(wanted)
    kinds: list[dict[str, Any]] = [{}, {"storage": None}, {"split": False}]  # of the last one no kernel takes more
    ours = [parameters() for _ in kinds]
    optimizers = [make(one, **options) for one, options in zip(ours, kinds, strict=True)]
    for step in range(3):
        give(wanted, step)
        theirs.step()
        for one, optimizer in zip(ours, optimizers, strict=True):
            give(one, step)
            with kernels.use("triton"):
                optimizer.step()
    split, plain, copies = ([o.master(p) for p in one] for one, o in zip(ours, optimizers, strict=True))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(split, plain, copies, strict=True))
    for found, expected in zip(split, wanted, strict=True):
        # fused or not, and in which order: a few roundings a step of numbers below 4
        torch.testing.assert_close(found, expected.detach(), rtol=0, atol=3 * 8 * 2.0**-23)


def test_parameters_are_stepped_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    real = updates.step
    monkeypatch.setattr(
        updates, "step", lambda columns, *rest: calls.append(len(columns.weights)) or real(columns, *rest)
    )
    ours = parameters()
    optimizer = AdamW(ours)
    give(ours, 0)
    with kernels.use("triton"):
        optimizer.step()
    assert calls == [4]  # all but the empty one


def far(p: Any, **k: Any) -> AdamW:
    return AdamW(p, lr=1e-2, betas=(0.4, 0.9), maximize=True, **k)


def damped(p: Any, **k: Any) -> SGD:
    return SGD(p, lr=0.1, momentum=0.9, dampening=0.5, weight_decay=1e-3, **k)


def nesterov(p: Any, **k: Any) -> SGD:
    return SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k)


FEW_BITS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (AdamW, {"moments": "int8", "masters": "split-8"}),
    (AdamW, {"moments": "mxfp4:stochastic", "storage": "e5m7", "masters": "stochastic"}),
    (AdamW, {"moments": "bf16", "masters": "none"}),
    (far, {"moments": "fp8", "masters": "stochastic"}),
    (damped, {"moments": "mxint8", "storage": "fp16", "masters": "stochastic"}),
    (nesterov, {"moments": "fp8", "storage": None}),
    (SGD, {"masters": "stochastic"}),
    (Lion, {"moments": "int8"}),
]


@pytest.mark.parametrize(("make", "options"), FEW_BITS, ids=lambda one: getattr(one, "__name__", str(one)))
def test_moments_and_weights_in_few_bits_are_one_kernel_with_the_bits_of_the_definition(
    make: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    real = updates.step
    monkeypatch.setattr(
        updates, "step", lambda columns, *rest: calls.append(len(columns.weights)) or real(columns, *rest)
    )
    found = []
    for way in ("triton", "bitwise"):
        ours = [nn.Parameter(torch.linspace(-2, 2, count).view(shape)) for count, shape in ((70, (7, 10)), (33, (33,)))]
        optimizer = make(ours, seed=7, **options)
        for step in range(3):
            give(ours, step)
            ours[1].grad[:2] = torch.tensor([0.0, 1e-20])  # type: ignore[index]
            optimizer.found_inf = torch.tensor(float(step == 2))  # then nothing changes
            optimizer.grad_scale = torch.tensor(4.0)
            with kernels.use(way):
                optimizer.step()
        found.append([one for p in ours for one in (p.detach(), *optimizer.state[p].values())])
    assert calls == [2, 2, 2]
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_shard_draws_as_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    start, found = nn.Parameter(torch.linspace(-2, 2, 1500)), []
    for first in (0, steps.BLOCK):
        weight = nn.Parameter(start.detach()[first:].clone())
        optimizer = AdamW([weight], moments="int8", masters="split-8", seed=7)
        monkeypatch.setattr(AdamW, "_places", lambda self, parameter, first=first: first)
        for step in range(2):
            whole = nn.Parameter(start.detach())
            give([whole], step)
            assert whole.grad is not None
            weight.grad = whole.grad[first:].to(weight.dtype)
            with kernels.use("triton"):
                optimizer.step()
        state = optimizer.state[weight]
        found.append([weight.detach(), *(state[name] for name in ("remainder", "exp_avg", "exp_avg_sq"))])
    assert all(torch.equal(one[steps.BLOCK :], other) for one, other in zip(*found, strict=True))


@pytest.mark.slow
def test_numbers_beyond_the_first_block_draw_by_seeds_of_their_own() -> None:
    found = []
    for way in ("triton", "bitwise"):
        weight = nn.Parameter(torch.randn(70_001, generator=torch.Generator().manual_seed(0)))
        optimizer = AdamW([weight], moments="int8", masters="split-8", seed=(1 << 64) - 3)
        for step in range(2):
            give([weight], step)
            with kernels.use(way):
                optimizer.step()
        found.append([weight.detach(), *optimizer.state[weight].values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_skipped_step_changes_nothing(name: str) -> None:
    ours = parameters()
    optimizer = MAKES[name][0](ours)
    scaler = lowp.GradScaler("cpu", init_scale=4.0)
    for step in range(2):
        give(ours, step)
        grad = ours[1].grad
        assert grad is not None
        if step == 1:
            before = [optimizer.master(parameter).clone() for parameter in ours]
            grad[17] = torch.inf
        scaler.scale(torch.ones(()))
        with kernels.use("triton"):
            scaler.step(optimizer)
        scaler.update()
    assert not scaler.stepped
    assert all(torch.equal(optimizer.master(p), value) for p, value in zip(ours, before, strict=True))
    assert all(float(optimizer.state[p]["step"]) == 1.0 for p in ours)


def test_gradients_are_divided_by_the_scale_of_the_loss() -> None:
    results = []
    for scale in (1.0, 3.0):
        ours = parameters()
        optimizer = AdamW(ours, storage=None)
        give(ours, 0)
        for parameter in ours:
            assert parameter.grad is not None
            parameter.grad.mul_(scale)
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(scale), torch.zeros(1)  # type: ignore[attr-defined]
        with kernels.use("triton"):
            optimizer.step()
        results.append([optimizer.master(parameter) for parameter in ours])
    for one, three in zip(*results, strict=True):
        torch.testing.assert_close(three, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_one_pass_unscales_checks_and_counts_gradients(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "INTERPRETED_BLOCK", 64)  # several programs
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(n, generator=generator).to(dtype) for n in (1, 0, 16, 200)]
    gradients[3][7], gradients[3][8] = 0.0, 2.0**-14
    wanted = [gradient.clone() for gradient in gradients]
    found, inverse = torch.zeros(()), torch.tensor(1 / 3)
    with kernels.use("triton"):
        seen = updates.check(gradients, found, inverse, histogram=True)
    torch._amp_foreach_non_finite_check_and_unscale_([one for one in wanted if len(one)], torch.zeros(1), inverse)
    assert all(torch.equal(one, other) for one, other in zip(gradients, wanted, strict=True))
    assert found == 0 and seen.histogram is not None and int(seen.histogram.sum()) == 216
    gradients[2][3] = torch.nan
    with kernels.use("triton"):
        seen = updates.check(gradients, found, histogram=True)
    assert found == 1 and seen.histogram is not None and int(seen.histogram.sum()) == 215


@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), AdamW], ids=["torch", "lowp"])
@pytest.mark.parametrize("bad", [False, True])
def test_a_scaler_looks_at_all_gradients_in_one_launch_a_dtype(
    make: Callable[..., Any], bad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    launches: list[torch.dtype] = []
    real = updates.check
    monkeypatch.setattr(updates, "check", lambda values, *rest: launches.append(values[0].dtype) or real(values, *rest))
    results = []
    for way in ("bitwise", "triton"):
        ours = parameters()
        optimizer, scaler = make(ours), lowp.GradScaler("cpu", init_scale=8.0, sample_interval=1)
        give(ours, 0)
        grad = ours[4].grad
        assert grad is not None
        ours[4].grad = grad.contiguous(memory_format=torch.channels_last)
        if bad:
            ours[4].grad[1, 2] = torch.nan
        with kernels.use(way):
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
            unscaled = [parameter.grad.clone() for parameter in ours]  # type: ignore[union-attr]
            scaler.step(optimizer)
        exponents = scaler._exponents
        scaler.update()
        found = scaler.nonfinite
        about = None if found is None else (found.name, found.kind, found.scale, found.maximum)
        results.append(([p.detach() for p in ours], unscaled, exponents, about, scaler.get_scale(), scaler.stepped))
    (weights, grads, counts, *rest), (others, other_grads, other_counts, *other_rest) = results
    dtype = ours[4].dtype  # lowp's optimizers have made the parameters bf16
    assert launches == [dtype] and rest == other_rest and torch.equal(counts, other_counts)  # type: ignore[arg-type]
    for one, other in zip(grads + (weights if make is not AdamW else []), other_grads + others, strict=False):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))


def test_a_table_on_a_device_is_made_once_for_the_same_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    class There:
        """A tensor of a device, as far as a table asks."""

        def __init__(self, address: int) -> None:
            self.address, self.is_cpu, self.device = address, False, torch.device("cuda", 0)

        def numel(self) -> int:
            return 5000

        def data_ptr(self) -> int:
            return self.address

    made: list[torch.Tensor] = []
    streams, capturing = [7], [False]

    def there(host: torch.Tensor, device: torch.device) -> torch.Tensor:
        made.append(host)
        return host

    monkeypatch.setattr(steps, "_there", there)
    monkeypatch.setattr(steps, "_chunks", steps.OrderedDict())
    monkeypatch.setattr(steps, "_tables", steps.OrderedDict())
    monkeypatch.setattr(steps, "_of_graphs", [])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: type("Stream", (), {"cuda_stream": streams[0]}))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])

    def asked(*addresses: int) -> steps.Table:
        return steps.table([[There(one) for one in addresses]])  # type: ignore[list-item]

    first = asked(16, 32)
    assert asked(16, 32) is first and asked(16, 48) is not first and asked(32, 16) is not first
    assert asked(16, 32) is first and len(made) == 4  # the chunks are those of all three
    streams[0] = 8  # another stream could read what is not copied yet
    assert asked(16, 32) is not first and len(made) == 6
    capturing[0] = True
    kept = asked(16, 32)
    asked(64, 80)  # made while a graph is captured: its memory is the graph's
    assert [one.addresses.tolist() for (one,) in steps._of_graphs if isinstance(one, steps.Table)] == [
        [[16, 5000], [32, 5000]],
        [[64, 5000], [80, 5000]],
    ]
    capturing[0] = False
    assert asked(16, 32) is kept and len(made) == 7
    asked(64, 80)
    assert len(made) == 8
    for address in range(steps._MOST_TABLES + 5):
        asked(address)
    assert len(steps._tables) == steps._MOST_TABLES


def test_steps_of_many_parameters_are_counted_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.optim import blockwise

    calls: list[int] = []
    real = blockwise._foreach_add_
    monkeypatch.setattr(blockwise, "_foreach_add_", lambda steps, one: calls.append(len(steps)) or real(steps, one))
    ours = parameters()
    optimizer = SGD(ours, lr=0.1)
    give(ours, 0)
    with kernels.use("triton"):
        optimizer.step()
    assert calls == [4] and all(float(optimizer.state[p]["step"]) == 1.0 for p in ours)


def test_a_device_without_the_kernel_says_so() -> None:
    with pytest.raises(Unavailable, match=r"no kernel checks gradients on cpu: lowp.kernels.use\('triton'\) has one"):
        updates.check([torch.ones(3)], torch.zeros(()))


def test_what_changes_by_step_is_read_from_tensors() -> None:
    """A repeated launch continues: steps are on the device, and so is a learning rate given as a tensor."""
    ours, others = parameters(), parameters()
    one, other = AdamW(ours, lr=torch.tensor(1e-2)), AdamW(others, lr=1e-2)  # type: ignore[arg-type]
    for step in range(2):
        for parameters_, optimizer in ((ours, one), (others, other)):
            give(parameters_, step)
            with kernels.use("triton"):
                optimizer.step()
    assert all(torch.equal(one.master(a), other.master(b)) for a, b in zip(ours, others, strict=True))


def test_moments_are_kept_in_blocks_of_codes_under_powers_of_two() -> None:
    has = {
        **{"e4m3fn@e8m0/2": True, f"e2m1@e8m0/{steps.LONGEST_BLOCK}": True, "mxfp8": True, "mxfp4": True},
        **{"e4m3fn@e8m0/1": False, f"e4m3fn@e8m0/{2 * steps.LONGEST_BLOCK}": False, "e3m2@e8m0/32": False},
        **{"nvfp4": False, "e4m3fn@fp32/32": False},
    }
    assert {name: steps.kept(None, parse(name)) is not None for name in has} == has
    for name, is_packed in (("mxfp4", True), ("mxfp8", False)):
        found = steps.kept(parse("bf16"), parse(name))
        assert found is not None and found.moments.layout.packed is is_packed
        assert (found.size, found.kind, found.rounds) == (32, "codes", True)
    for name in ("bf16", "fp32"):
        found = steps.kept(None, parse(name))
        assert found is not None and (found.size, found.kind, found.rounds) == (32, name, False)


def test_a_kernel_steps_what_begins_at_a_block_and_is_kept_in_formats_that_it_has() -> None:
    fp32 = parse("fp32")
    for place, fits in ((0, True), (steps.BLOCK, True), (5 * steps.BLOCK, True), (1, False), (steps.BLOCK + 1, False)):
        assert updates.fits_triton(None, fp32, place) is fits
    assert not updates.fits_triton(None, fp32, torch.tensor(0)), "a place that only the device knows"
    for weight, moments, fits in ((parse("bf16"), "mxint8", True), (None, "mxfp4", True), (None, "int8", False)):
        assert updates.fits_triton(weight, parse(moments), 0) is fits, moments


@pytest.mark.parametrize("options", [{"storage": None}, {}, {"masters": "split-8"}], ids=str)
def test_a_parameter_alone_is_stepped_as_several_are(options: dict[str, Any]) -> None:
    found = []
    for way in ("triton", "bitwise"):
        one = nn.Parameter(torch.linspace(-2, 2, 40))
        optimizer: Any = SGD([one], lr=0.1, momentum=0.9, maximize=True, moments="int8", **options)
        one.grad = torch.linspace(0.1, 3, 40).bfloat16().to(one.dtype)
        with kernels.use(way):
            optimizer.step()
        found.append((one.detach(), *optimizer.state[one].values()))
    assert all(map(torch.equal, *found))


def short_blocks(patch: pytest.MonkeyPatch) -> None:
    """Give a program of the interpreter chunks of 64 numbers, in blocks of 16, as one of a device has several."""
    real = steps.table

    def table(columns: Any, *more: Any) -> steps.Table:
        chunks = steps._pieces([one.numel() for one in columns[0]], 64)
        return real(columns, *more)._replace(chunks=chunks, chunk=64, block=16)

    patch.setattr(steps, "table", table)


PLAIN: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (AdamW, {}),
    (AdamW, {"storage": None, "maximize": True}),
    (nesterov, {}),
    (Lion, {"masters": "split-8"}),
]


@pytest.mark.parametrize(("make", "options"), [*PLAIN, *FEW_BITS], ids=lambda one: getattr(one, "__name__", str(one)))
def test_steps_of_chunks_of_several_blocks_with_specials(
    make: Callable[..., Any], options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    # torch's order of the plain steps is another one: they are those of one block
    for way in ("triton" if (make, options) in PLAIN else "bitwise", "triton"):
        if found:
            short_blocks(monkeypatch)
        ours = [nn.Parameter(torch.linspace(-2, 2, count)) for count in (150, 33, 64)]
        optimizer = make(ours, seed=7, **options)
        for step in range(3):
            give(ours, step)
            ours[0].grad[3:6] = torch.tensor([torch.inf, torch.nan, -0.0])  # type: ignore[index]
            ours[1].grad[:2] = torch.tensor([0.0, 1e-20])  # type: ignore[index]
            with torch.no_grad():
                ours[2][:20] = 0.0  # by other code, also the half of a weight with a remainder
                ours[2][40] = -torch.nan
            with kernels.use(way):
                optimizer.step()
        found.append([one for p in ours for one in (p.detach(), *optimizer.state[p].values())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7), other.nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_checks_of_chunks_of_several_blocks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    short_blocks(monkeypatch)
    generator = torch.Generator().manual_seed(0)
    # of numbers of 8 bits many are midpoints after a product with 3 / 4
    for place, bad, by in ((None, False, 0.75), (70, True, 1 / 3), (149, True, 0.75), (3, True, 0.75)):
        gradients = [torch.randn(n, generator=generator).to(dtype) for n in (150, 64, 5, 40)]
        gradients[3].zero_()
        gradients[0][20], gradients[1][63] = -90.0, 100.0
        gradients[2][:3] = torch.tensor([0.0, -0.0, 2.0**-14])
        if place is not None:
            gradients[0][place] = torch.nan if place == 3 else -torch.inf
        before = [one.clone().float() for one in gradients]
        wanted = [one.clone() for one in gradients]
        found, inverse = torch.zeros(()), torch.tensor(by)
        with kernels.use("triton"):
            seen = updates.check(gradients, found, inverse, histogram=True)
        torch._amp_foreach_non_finite_check_and_unscale_(wanted, torch.zeros(1), inverse)
        assert bool(found) is bad and seen.histogram is not None
        for one, other in zip(gradients, wanted, strict=True):
            assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(7), other.nan_to_num(7))
        largest = torch.stack([one.abs().max() for one in before])
        assert torch.equal(seen.largest.nan_to_num(7), largest.nan_to_num(7))
        every = torch.cat(before)
        every = every[every.isfinite() & (every != 0)]
        fields = (every.abs().view(torch.int32) >> 23).bincount(minlength=256)
        assert torch.equal(seen.histogram.flatten().long(), fields)


def test_the_table_of_a_host_has_the_addresses_numbers_and_chunks_of_each_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one, two, three, four = (torch.zeros(count) for count in (20, 70, 20, 70))
    found = steps.table([[one, two], [three, four]], [7, 8])
    assert found.addresses.tolist() == [
        [one.data_ptr(), three.data_ptr(), 20, 7],
        [two.data_ptr(), four.data_ptr(), 70, 8],
    ]
    assert found.chunks.tolist() == [[0, 0], [1, 0]] and found.chunks.dtype is torch.int32
    assert (found.aligned, found.chunk, found.block) == (True, 128, 128)
    assert [steps.table([[torch.zeros(count)]]).block for count in (1, 16, 17, 32)] == [16, 16, 32, 32]
    assert not steps.table([[one, two[1:]]]).aligned and not steps.table([[one[2:]], [three]]).aligned
    assert steps.table([[one, two[4:]]]).aligned
    monkeypatch.setattr(steps, "INTERPRETED_BLOCK", 32)
    assert steps.table([[one, two, torch.zeros(32)]]).chunks.tolist() == [[0, 0], [1, 0], [1, 1], [1, 2], [2, 0]]


def test_copies_wait_in_pinned_memory_which_a_captured_graph_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        def pin_memory(self) -> Host:
            return pinned

        def to(self, device: torch.device, non_blocking: bool) -> tuple[Host, torch.device, bool]:
            return self, device, non_blocking

    host, pinned, device, capturing = Host(), Host(), torch.device("cuda", 0), [False]
    monkeypatch.setattr(steps, "_of_graphs", [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    assert steps._there(host, torch.device("cpu")) is host
    assert steps._there(host, device) == (pinned, device, True) and steps._of_graphs == []
    capturing[0] = True
    assert steps._there(host, device) == (pinned, device, True) and steps._of_graphs == [(pinned,)]


def test_programs_of_a_step_have_blocks_of_whole_groups_in_one_share(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(kernel: Any, grid: tuple[int, ...], *given: Any, warps: int) -> None:
        calls.append((kernel.fn.__name__, *grid, *given[-4:], warps))

    monkeypatch.setattr(steps, "run", run)
    for options, count, place, wanted in (
        ({}, 70, 0, (32, True, 128, 128, 4)),
        ({"moments": "bf16"}, 70, 0, (32, True, 128, 128, 8)),
        ({"moments": "mxfp8"}, 10, 0, (32, True, 16, 32, 8)),
        ({"masters": "stochastic"}, 100_000, 0, (32, True, 1 << 17, 1 << 16, 8)),
        ({"moments": "bf16"}, 3000, steps.BLOCK, (32, True, 4096, 1024, 8)),
        ({}, 3000, steps.BLOCK, (32, True, 4096, 4096, 4)),
    ):
        weight = nn.Parameter(torch.zeros(count))
        optimizer = SGD([weight], lr=0.1, momentum=0.9, **options)  # type: ignore[arg-type]
        monkeypatch.setattr(SGD, "_places", lambda self, parameter, place=place: place)
        weight.grad = torch.ones_like(weight)
        with kernels.use("triton"):
            optimizer.step()
        assert calls == [("step", 1, *wanted)], (options, count, place)
        calls.clear()


def test_gradients_without_numbers_start_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "run", None)
    found = steps.check([torch.empty(0), torch.empty(0, 3)], None, torch.zeros(()), None)
    assert found.tolist() == [0.0, 0.0] and found.dtype is torch.float32


def test_blocks_behind_the_first_share_of_a_whole_draw_by_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for way in ("bitwise", "triton"):
        weight = nn.Parameter(torch.linspace(-2, 2, 150))
        optimizer = SGD([weight], lr=0.1, momentum=0.9, masters="stochastic", moments="mxfp8:stochastic", seed=7)
        monkeypatch.setattr(SGD, "_places", lambda self, parameter: 3 << 16)
        if found:
            short_blocks(monkeypatch)
        for step in range(2):
            give([weight], step)
            with kernels.use(way):
                optimizer.step()
        found.append([weight.detach(), *optimizer.state[weight].values()])
    assert all(map(torch.equal, *found))
