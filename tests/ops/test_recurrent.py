"""Recurrent networks under a rule: every form of torch's one call, and the cells."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ops.cases import sixteen_bit, under
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import lowp
from lowp import kernels
from lowp.ops.direct import Direct
from lowp.policy import Rule

EXACT = Rule.of(input="fp32", weight="fp32", grad="fp32", output="fp32")
NAMES = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class Under(TorchFunctionMode):
    """Runs recurrent calls by their runners."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.seen = rule, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "").removesuffix("_cell") not in NAMES:
            return func(*args, **(kwargs or {}))
        self.seen += 1
        return under(self.rule, func, *args, **(kwargs or {}))


def network(name: str, *args: Any, **kwargs: Any) -> nn.RNNBase:
    if name.startswith("rnn"):
        return nn.RNN(*args, nonlinearity=name[4:], **kwargs)
    return nn.LSTM(*args, **kwargs) if name == "lstm" else nn.GRU(*args, **kwargs)


def flat(outputs: Any) -> list[Tensor]:
    """Return the tensors among outputs: hidden states, and the data of a packed sequence without its sizes."""
    if isinstance(outputs, nn.utils.rnn.PackedSequence):
        return [outputs.data]
    if isinstance(outputs, tuple):
        return [one for part in outputs for one in flat(part)]
    return [outputs]


def trained(module: nn.RNNBase, x: Tensor, packed: bool, rule: Rule | None) -> list[Tensor]:
    """Return outputs and gradients."""
    x = x.clone().requires_grad_()
    given: Any = x
    if packed:
        given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([6, 5, 3, 3]), batch_first=module.batch_first)
    if rule is None:
        outputs = flat(module(given))
    else:
        with Under(rule) as mode:
            outputs = flat(module(given))
        assert mode.seen == 1
    generator = torch.Generator().manual_seed(1)
    weighted = [(y.float() * torch.randn(y.shape, generator=generator)).sum() for y in outputs]
    return [*outputs, *torch.autograd.grad(torch.stack(weighted).sum(), [x, *module.parameters()])]


FORMS = list(itertools.product((1, 2), (False, True), (False, True), (True, False), (False, True)))


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own call
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_form_is_torch_s(name: str, form: tuple[Any, ...]) -> None:
    layers, bidirectional, batch_first, bias, packed = form
    torch.manual_seed(0)
    kwargs = {"bidirectional": bidirectional, "batch_first": batch_first, "bias": bias}
    for projection in ({}, {"proj_size": 3}) if name == "lstm" else ({},):
        module = network(name, 5, 7, layers, **kwargs, **projection)
        x = torch.randn(4, 6, 5) if batch_first else torch.randn(6, 4, 5)
        wanted = trained(module, x, packed, None)
        # a rounded pre-activation may change sides at relu's edge
        rules = [(EXACT, 1e-5)] if name == "rnn_relu" else [(EXACT, 1e-5), (sixteen_bit("fp16"), 0.02)]
        for rule, tolerance in rules:
            for one, other in zip(trained(module, x, packed, rule), wanted, strict=True):
                assert one.shape == other.shape
                assert (one.float() - other).abs().max() <= tolerance * other.abs().max() + 1e-6


@pytest.mark.parametrize("rule", [sixteen_bit("bf16"), Rule.of(input="bf16-tpu", weight="bf16-tpu")], ids=str)
def test_one_step_is_two_contractions_and_gates_in_fp32(rule: Rule) -> None:
    module, x = nn.LSTM(5, 7), torch.randn(1, 4, 5)
    with Under(rule):
        output, (_, memory) = module(x)
    w_ih, w_hh, b_ih, b_hh = (one.detach() for one in module.parameters())
    h = under(rule, F.linear, torch.zeros(4, 7), w_hh, b_hh).float()
    sums = under(rule, F.linear, x[0], w_ih, b_ih).float() + h
    i, f, _, o = sums.sigmoid().chunk(4, 1)
    wide = f * 0 + i * sums.chunk(4, 1)[2].tanh()
    assert torch.equal(memory[0], wide.to(memory.dtype))
    assert torch.equal(output[0], (o * wide.tanh()).to(output.dtype))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("precision", ["fp16", "e5m7", "fp8", "mxfp8", "nvfp4", "int8", "e4m3fn:stochastic"])
def test_states_are_projected_straight_from_their_arguments_with_the_bits_of_the_definition(
    precision: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = network(name, 5, 7, 1), torch.randn(6, 4, 5)

    def run() -> list[Tensor]:
        torch.manual_seed(7)
        given = x.clone().requires_grad_()
        with kernels.use("cpu"), lowp.autocast(precision):
            y, _ = module(given)
        return [y, *torch.autograd.grad(y.float().square().sum(), (given, *module.parameters()))]

    fast = run()
    monkeypatch.setattr(Direct, "contract", lambda *given: None)
    assert all(map(torch.equal, fast, run()))


def test_outputs_and_states_are_written_in_the_rule_s_dtype() -> None:
    with Under(sixteen_bit("bf16")):
        output, (hidden, memory) = nn.LSTM(5, 7, 2)(torch.randn(6, 4, 5))
    assert {one.dtype for one in (output, hidden, memory)} == {torch.bfloat16}


def test_the_weight_s_gradient_is_one_product_over_all_steps() -> None:
    """A running sum in bf16 would lose small steps."""
    module, x = nn.RNN(4, 16, bias=False), torch.randn(200, 8, 4)
    exact = trained(module, x, False, None)
    found = trained(module, x, False, sixteen_bit("bf16"))
    for one, other in zip(found[-2:], exact[-2:], strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_everything_kept_for_backward_takes_16_bits() -> None:
    module, x = nn.LSTM(32, 32), torch.randn(20, 8, 32, requires_grad=True)
    kept: dict[int, tuple[int, torch.dtype]] = {}

    def pack(one: Tensor) -> Tensor:
        kept[one.untyped_storage().data_ptr()] = (one.numel(), one.dtype)
        return one

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda one: one), Under(sixteen_bit("bf16")):
        result = module(x)
    wide = [count for count, dtype in kept.values() if dtype is torch.float32]
    # the biases and the initial states; nothing that grows with the steps
    assert result[0].requires_grad and sum(wide) <= 2 * 4 * 32 + 2 * 8 * 32
    assert sum(count for count, _ in kept.values()) - sum(wide) <= 20 * 8 * (32 + 4 * 32 + 32) + 2 * 4 * 32 * 32


@pytest.mark.parametrize("name", NAMES)
def test_double_backward(name: str) -> None:
    module, x = network(name, 3, 4), torch.randn(3, 2, 3, requires_grad=True)

    def second(run: Callable[[Tensor], Any]) -> Tensor:
        (first,) = torch.autograd.grad(run(x)[0].sin().sum(), x, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), x)
        return found

    wanted = second(module)
    with Under(EXACT):
        result = module(x)
    torch.testing.assert_close(second(lambda _: result), wanted, rtol=1e-4, atol=1e-6)


def test_dropout_between_layers_falls_in_training_alone() -> None:
    module, x = nn.GRU(5, 7, 2, dropout=0.9), torch.randn(6, 4, 5)
    with Under(EXACT):
        first, second = module(x)[0], module(x)[0]
    assert not torch.equal(first, second)
    module.eval()
    with Under(EXACT):
        torch.testing.assert_close(module(x)[0], module(x)[0])


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell: Callable[..., nn.Module]) -> None:
    for shape, bias in itertools.product(((3, 5), (5,)), (True, False)):
        module, x = cell(5, 7, bias=bias), torch.randn(shape)
        wanted = flat(module(x))
        for rule, tolerance in ((EXACT, 1e-6), (sixteen_bit("bf16"), 0.02)):
            with Under(rule) as mode:
                found = flat(module(x))
            assert mode.seen == 1
            for one, other in zip(found, wanted, strict=True):
                assert one.shape == other.shape and (one.float() - other).abs().max() <= tolerance


def test_torch_func_gives_the_same_gradient() -> None:
    module, x = nn.GRU(5, 7), torch.randn(6, 4, 5)

    def loss(one: Tensor) -> Tensor:
        with Under(sixteen_bit("bf16")):
            result: Tensor = module(one)[0].float().sin().sum()
        return result

    leaf = x.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(loss)(x), wanted, rtol=0.05, atol=0.02)


def test_a_narrow_accumulator_reaches_the_hidden_projection() -> None:
    module, x = nn.RNN(4, 64, bias=False), torch.randn(5, 2, 4)
    plain = trained(module, x, False, EXACT)
    narrow = trained(module, x, False, Rule.of(accumulate="bf16/1"))
    assert 0 < (plain[0] - narrow[0]).abs().max() < 0.1


def test_a_packed_call_gives_its_settings_by_place_or_by_name() -> None:
    module = nn.LSTM(3, 4)
    data, state, weights = torch.randn(5, 3), torch.zeros(1, 3, 4), list(module.parameters())
    sizes, names = torch.tensor([3, 2]), ("has_biases", "num_layers", "dropout", "train", "bidirectional")
    settings = (True, 1, 0.0, False, False)
    found = []
    for count in range(len(names) + 1):
        by_name = dict(zip(names[count:], settings[count:], strict=True))
        found.append(
            under(sixteen_bit("fp16"), torch.lstm, data, sizes, (state, state), weights, *settings[:count], **by_name)
        )
    assert found[0][0].dtype is torch.float16
    assert all(torch.equal(*pair) for one in found for pair in zip(one, found[0], strict=True))
