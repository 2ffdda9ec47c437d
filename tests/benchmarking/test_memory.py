"""Memory is counted by its content, operations by their operands, and the largest batch is measured."""

from __future__ import annotations

import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from torch import nn

from lowp import Precision
from lowp.benchmarking import largest_batch as process_memory
from lowp.benchmarking import memory, operations
from lowp.benchmarking.contenders import begin, contenders_of
from lowp.benchmarking.largest_batch import LargestBatch, bytes_from, largest_batch
from lowp.benchmarking.memory import PARTS, batch_of, memory_of
from lowp.benchmarking.operations import Operations, counted, fits_16_bits
from lowp.errors import InvalidInput
from lowp.recipes.recipe import examples_of, tokens_of
from lowp.recipes.training import Settings, load_data

WIDE = Settings("digits", size="full", batch=512).filled()
DATA = load_data(WIDE)
FP32, AMP_FP16, AMP_BF16, FP16, STORED, FLEX = contenders_of(WIDE, ["fp16", "fp16-storage", "flex16+5"], True)
PARAMETERS = 64 * 1024 + 1024 + 1024 * 10 + 10


# -- what memory is used for ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("contender", [FP32, AMP_FP16, FP16, STORED, FLEX], ids=lambda one: one.label)
def test_the_parts_sum_to_the_peak(contender: Any) -> None:
    split = memory_of(contender, DATA, 512)
    assert set(split.parts) == set(PARTS) and min(split.parts.values()) >= 0
    assert sum(split.parts.values()) == split.allocated
    assert split.held["weights"] == (2 if contender is STORED else 4) * PARAMETERS
    assert split.held["masters"] == (4 * PARAMETERS if contender is STORED else 0)
    assert split.held["optimizer"] == 4 * PARAMETERS  # momentum
    assert split.held["gradients"] == 4 * PARAMETERS  # unscaled in fp32, whatever the weights are stored in
    assert split.reserved is None


@pytest.mark.parametrize(
    ("scales", "seconds", "steps"),
    [
        ([8, 8], 0, 1),
        ([8, 4, 4], 0, 2),
        ([8, 4, 2, 4], 0, 3),
        (range(40, 0, -1), 0, 12),
        (range(40, 0, -1), 8, 3),  # the third ends at 24 s
        (range(40, 0, -1), 10, 3),  # the second at 20 s
    ],
)
def test_steps_are_taken_until_one_is_not_skipped(
    scales: Any, seconds: float, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(*given: Any) -> None:
        taken.append(given)
        clock[0] += seconds

    taken, clock = list[Any](), [100.0]
    monkeypatch.setattr(memory, "step_of", step)
    monkeypatch.setattr(memory.time, "perf_counter", lambda: clock[0])
    precision = type("Scaled", (), {"scale": property(lambda _: scales[len(taken)])})()
    training: Any = SimpleNamespace(precision=precision)
    memory.warm_up(training, FP32, "batch")
    assert taken == [(training, FP32, "batch")] * steps


def test_what_a_profiler_writes_is_not_seen_and_what_comes_after_is(capfd: pytest.CaptureFixture[str]) -> None:
    files = len(list(Path("/dev/fd").iterdir())) if Path("/dev/fd").exists() else 0
    with memory._silent():
        os.write(2, b"unseen")
    os.write(2, b"seen")
    assert capfd.readouterr().err == "seen"
    assert files == (len(list(Path("/dev/fd").iterdir())) if files else 0)


def test_profiles_record_calls_after_memory_was_measured() -> None:
    memory_of(FP32, DATA, 2)
    with torch.profiler.profile() as profiler:
        torch.ones(2).add(1)
    assert "aten::add" in {one.key for one in profiler.key_averages()}


def test_what_is_stored_otherwise_than_dense_has_no_address() -> None:
    model = nn.Embedding(4, 2, sparse=True)
    model.register_buffer("empty", torch.zeros(0))
    model(torch.arange(2)).sum().backward()
    training: Any = SimpleNamespace(
        model=model, optimizer=torch.optim.SGD(model.parameters()), precision=Precision("fp32")
    )
    assert memory._persistent(training) == {model.weight.data_ptr(): "weights"}


def test_on_a_gpu_the_peaks_are_those_of_its_allocator_since_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    told = {"memory_allocated": 10, "memory_reserved": 20, "max_memory_allocated": 110, "max_memory_reserved": 320}
    for name in ("empty_cache", "synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name: calls.append(name))
    for name, size in told.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, size=size: size)
    split = memory.Split(90, {"other": 5, "weights": 85}, {"weights": 85})
    taken = memory.Taken(torch.device("cuda"))
    taken.begin()
    taken.end()
    assert calls == ["empty_cache", "synchronize", "reset_peak_memory_stats", "synchronize"]
    assert taken.corrected(split) == memory.Split(100, {"other": 15, "weights": 85}, {"weights": 85}, 300)
    on_cpu = memory.Taken(torch.device("cpu"))
    on_cpu.begin()
    on_cpu.end()
    assert on_cpu.corrected(split) is split and len(calls) == 4


def test_sixteen_bits_halve_the_activations_of_a_wide_perceptron() -> None:
    wide, half, torch_half = (memory_of(one, DATA, 512).held for one in (FP32, FP16, AMP_FP16))
    # fp32 keeps the hidden layer's output; of 16 bits both the output and ReLU's copy of it are that dtype
    assert wide["activations"] >= 4 * 512 * 1024
    assert half["activations"] < 0.6 * wide["activations"]
    assert half["activations"] == pytest.approx(torch_half["activations"], rel=0.05)
    # both matrices are cast; backward needs no cast of the first, whose input has no gradient
    assert half["casts"] == torch_half["casts"] == 2 * 1024 * 10
    assert wide["casts"] == 0


def test_more_examples_take_more_activations_and_no_more_weights() -> None:
    small, large = memory_of(FP32, DATA, 256), memory_of(FP32, DATA, 1024)
    assert large.held["activations"] == pytest.approx(4 * small.held["activations"], rel=0.02)
    assert all(large.held[name] == small.held[name] for name in ("weights", "gradients", "optimizer"))


@pytest.mark.skipif(not process_memory.is_known(), reason="this system does not tell how large a process was")
def test_a_fresh_process_grows_by_what_a_step_takes() -> None:
    forked.begin()
    split = memory_of(FP32, DATA, 8192)
    growth = process_memory.process_growth(FP32, DATA, 8192, 1)
    assert growth is not None and 0.8 * split.allocated < growth < 2 * split.allocated


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="signals cannot be blocked here")
def test_ctrl_c_does_not_reach_the_process_that_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(process: Any) -> None:
        blocked.append(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        assert process.daemon
        raise KeyboardInterrupt

    blocked: list[bool] = []
    monkeypatch.setattr(type(multiprocessing.get_context("forkserver").Process()), "start", start)
    with pytest.raises(KeyboardInterrupt):
        process_memory.process_growth(FP32, DATA, 8, 1)
    assert blocked == [True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_growth_is_not_known_where_nobody_tells_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    assert not process_memory.is_known() and process_memory.process_growth(FP32, DATA, 8, 1) is None
    for size, known in ((0, False), (1, True)):
        (tmp_path / "status").write_text(f"Name:\tpython: 1\nVmHWM:\t  {size} kB\n")
        assert process_memory.is_known() is known
    gpu = contenders_of(replace(WIDE, device="meta"), [], torch_amp=False)[0]
    assert process_memory.process_growth(gpu, DATA, 8, 1) is None


@pytest.mark.parametrize(
    ("sent", "lives", "stopped", "found"),
    [(5, True, False, 5), (None, True, False, None), ("", True, True, None), ("", False, False, None)],
)
def test_the_process_that_grows_is_waited_for_until_it_has_sent_or_ended_or_is_not_wanted(
    sent: int | str | None, lives: bool, stopped: bool, found: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []

    class Process:
        def __init__(self, **given: Any) -> None:
            self.sending, *rest = given["args"]
            calls.append(rest)

        def start(self) -> None:
            if sent != "":
                self.sending.send(sent)

        def is_alive(self) -> bool:
            return lives

        def join(self, seconds: float | None = None) -> None:
            calls.append(seconds)

        def kill(self) -> None:
            calls.append("killed")

    context = SimpleNamespace(set_forkserver_preload=calls.append, Pipe=multiprocessing.Pipe, Process=Process)
    monkeypatch.setattr(process_memory.multiprocessing, "get_context", lambda name: context)
    monkeypatch.setattr(process_memory, "is_known", lambda: True)
    assert process_memory.process_growth(FP32, DATA, len(DATA.training) + 2, 3, lambda: stopped) == found
    preloaded, (contender, examples, threads), *ended = calls
    assert preloaded == ["lowp.benchmarking.largest_batch"] and ended == [1, "killed", None]
    assert (contender, threads, len(examples)) == (FP32, 3, len(DATA.training) + 2)
    inputs, _ = examples.batch(torch.arange(3))
    assert len(inputs) == len(DATA.training) + 2 and torch.equal(inputs[-2:], inputs[:2])


# -- operations -------------------------------------------------------------------------------------------------------
class Everything(nn.Module):
    """A convolution and its transposed, attention, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.convolve = nn.Conv2d(3, 8, 3, padding=1)
        self.back = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.linear = nn.Linear(16, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.back(self.convolve(x)).flatten(2)  # [N, 4, 16 * 16]
        y = y.view(len(x), 4, 16, 16)
        attended: torch.Tensor = self.linear(nn.functional.scaled_dot_product_attention(y, y, y))
        return attended


def operations_of(precision: Precision | None, autocast: torch.dtype | None = None) -> Operations:
    torch.manual_seed(0)
    model, x = Everything(), torch.randn(2, 3, 8, 8)

    def step() -> None:
        region: Any = torch.autocast("cpu", autocast) if precision is None else precision.autocast()
        with region:
            loss = model(x).float().square().mean()
        loss.backward()

    return counted(step)


FORWARD = {
    "convolution": 2 * 2 * 64 * 8 * 27,
    "transposed": 2 * 2 * 64 * 8 * 16,
    "attention": 2 * 2 * 2 * 4 * 16 * 16 * 16,
    "linear": 2 * 2 * 4 * 16 * 16 * 5,
}
# the input of the first layer needs no gradient; attention's backward computes the scores again: 5 products for 2
PLAIN = 2 * FORWARD["convolution"] + 3 * FORWARD["transposed"] + FORWARD["attention"] * 7 // 2 + 3 * FORWARD["linear"]


def test_operations_are_those_of_the_contractions_forward_and_backward() -> None:
    fp32 = operations_of(Precision("fp32"))
    assert fp32 == Operations(PLAIN, 0) and fp32.share == 0.0
    assert operations_of(None, torch.bfloat16) == Operations(PLAIN, PLAIN)


@pytest.mark.parametrize("precision", ["fp16", "bf16", "dfp16", "flex16+5", "fp8", "e5m7", "bf16-tpu"])
def test_operations_of_lowp_are_in_16_bits(precision: str) -> None:
    found = operations_of(Precision(precision))
    # backward computes attention's scores again, as torch's does; in dfp16 it has what the forward pass computed
    again = -FORWARD["attention"] // 2 if precision == "dfp16" else 0
    assert found == Operations(PLAIN + again, PLAIN + again)


def test_operations_under_scales_of_any_value_are_in_16_bits() -> None:
    training = begin(contenders_of(WIDE, ["int8"], torch_amp=False)[1], DATA)
    assert counted(lambda: training.step(batch_of(training, 64))).share == 1


def test_a_policy_that_leaves_a_layer_in_fp32_has_a_smaller_share() -> None:
    from lowp.policy import Policy, Rule

    rules = (Rule.of("contraction", where="linear"), Rule.of("contraction", input="fp16", weight="fp16", grad="fp16"))
    found = operations_of(Precision(Policy(rules), loss_scale="none"))
    assert found.total - found.narrow == 3 * FORWARD["linear"]


def test_what_computes_an_integer_product_is_not_counted_beside_it() -> None:
    counter, x = operations._Counter(), torch.full((3, 2), 0.1)
    with counter:
        with counter.product_of_integers(10):
            x @ x.mT
        assert (counter.total, counter.narrow) == (10, 10)
        x @ x.mT
    assert (counter.total, counter.narrow) == (10 + 2 * 3 * 3 * 2, 10)


def test_integer_products_are_counted_as_long_as_it_is_asked_for() -> None:
    from lowp.kernels.int16 import integer

    a = torch.ones(3, 4, dtype=torch.int16)
    found = counted(lambda: (integer.multiply(a, a.mT, dtype=None), torch.ones(2, 5) @ torch.rand(5, 2)))
    assert (found.total, found.narrow) == (2 * 3 * 3 * 4 + 2 * 2 * 5 * 2, 2 * 3 * 3 * 4)
    integer.multiply(a, a.mT, dtype=None)
    assert (found.total, found.narrow) == (2 * 3 * 3 * 4 + 2 * 2 * 5 * 2, 2 * 3 * 3 * 4)
    assert counted(lambda: torch.ones(2)).share is None
    assert counted(lambda: torch.eye(3).to_sparse().clone()).share is None


@pytest.mark.parametrize(
    ("text", "narrow"), [("int8", True), ("i16s@fp32/tensor", True), ("i17s@fp32/tensor", False), ("fp16", False)]
)
def test_casts_under_scales_of_any_value_are_narrow_up_to_16_bits(text: str, narrow: bool) -> None:
    assert operations._is_narrow(text) is narrow


@pytest.mark.parametrize(
    ("values", "fits"),
    [
        (torch.tensor([1.0, 0.1]).half().float(), True),
        (torch.tensor([1e30, 1.0]).bfloat16().float(), True),
        (torch.tensor([32767.0, -3.0, 0.0]) * 2.0**-60, True),
        (torch.tensor([32767.0, 0.5]) * 2.0**-60, False),
        (torch.tensor([65535.0, 1.0]) * 2.0**-60, False),
        (torch.tensor([0.1, 1.0]), False),
        (torch.tensor([torch.inf, torch.nan, 1.0]), True),
        (torch.tensor([torch.inf, 0.1]), False),
        (torch.zeros(0), True),
        (torch.zeros(3), True),
    ],
)
def test_numbers_fit_16_bits_where_one_format_has_them_all(values: torch.Tensor, fits: bool) -> None:
    assert fits_16_bits(values) is fits


# -- the largest batch ------------------------------------------------------------------------------------------------
def searched(limit: int, used: Any, start: int = 8, stop: Any = lambda batch: "") -> LargestBatch:
    return largest_batch(limit, used, start, stop)


@pytest.mark.parametrize("start", [1, 8, 1000])
@pytest.mark.parametrize("limit", [1_000, 12_345, 99_999])
def test_the_largest_batch_of_a_line_is_found_exactly_or_within_a_hundredth(limit: int, start: int) -> None:
    found = searched(limit, lambda batch: 500 + 7 * batch, start)
    exact = (limit - 500) // 7
    assert found.is_closed and not found.ended
    assert 0 <= exact - found.batch <= max(1, exact // 100)
    assert found.too_large is not None and 500 + 7 * found.too_large > limit
    assert found.peak == 500 + 7 * found.batch <= limit


@pytest.mark.parametrize(
    "used",
    [lambda batch: 500 + batch * batch // 9, lambda batch: 4096 * (1 + batch // 50), lambda batch: 10 * batch**0.9],
)
def test_what_is_no_line_is_searched_until_a_batch_fits_and_the_next_ones_do_not(used: Any) -> None:
    found = searched(30_000, used)
    assert (found.batch and found.is_closed) or found.ended
    assert used(found.batch) <= 30_000
    assert found.too_large is None or used(found.too_large) > 30_000


def test_a_batch_for_which_memory_ran_out_does_not_fit() -> None:
    found = searched(10**9, lambda batch: batch if batch < 100 else None)
    assert (found.batch, found.too_large) == (99, 100)


def test_where_not_one_example_fits_the_batch_is_zero() -> None:
    found = searched(100, lambda batch: 500 + batch)
    assert (found.batch, found.too_large, found.peak) == (0, 1, None)


def test_a_search_that_would_take_too_long_says_so() -> None:
    found = searched(10**6, lambda batch: batch, stop=lambda batch: "too long" if batch > 1000 else "")
    assert found.ended == "too long" and not found.is_closed and 8 <= found.batch <= 1000


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("512 mib", 2**29),
        ("800b", 800),
        (".5kb", 500),
        ("1B", 1),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert bytes_from(text) == size


@pytest.mark.parametrize("text", ["2 gigs", "", "3", "800", "GB", "-2GB", "two GB", "2GB2"])
def test_a_bad_size_explains_itself(text: str) -> None:
    with pytest.raises(
        InvalidInput, match=r"is not a size: give a number and a unit, such as 2GB or 512MiB; units: KB, MB"
    ):
        bytes_from(text)
    with pytest.raises(InvalidInput, match=r"--memory '0.1B' is not possible: give at least one byte"):
        bytes_from("0.1B")


@pytest.mark.skipif(not process_memory.is_known(), reason="this system does not tell how large a process was")
def test_the_growth_of_a_process_holds_what_it_has_taken_for_a_time() -> None:
    with process_memory.growth() as grown:
        torch.ones(1 << 24)  # 64 MiB, which are given back
        found = grown()
    assert found is not None and found > 60 * 2**20


def test_growth_is_the_peak_beyond_what_was_resident(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def told(resident: int, peak: int) -> None:
        status.write_text(f"VmHWM:\t {peak} kB\nVmRSS:\t {resident} kB\n")

    status = tmp_path / "status"
    monkeypatch.setattr(process_memory, "_STATUS", status)
    with process_memory.growth() as grown:
        assert grown() is None
        told(1, 30)
        assert grown() == 1024 * 30
    with process_memory.growth() as grown:
        told(500, 130)
        assert grown() == 1024 * 129
        told(500, 1)
        assert grown() == 0


# -- throughput -------------------------------------------------------------------------------------------------------
def test_batches_are_counted_by_examples_or_tokens() -> None:
    batch = {"pieces": torch.zeros(4, 7), "start": torch.zeros(4)}
    assert examples_of(batch) == 4 and tokens_of(batch) == 28
    assert examples_of(([torch.zeros(3, 2)], torch.zeros(9))) == 3


def test_a_process_whose_parent_waits_no_more_ends_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    receiving, sending = multiprocessing.Pipe(duplex=False)
    receiving.close()

    def stopped(*given: Any) -> None:
        raise RuntimeError("stopped")

    monkeypatch.setattr(process_memory, "begin", stopped)
    before = signal.getsignal(signal.SIGINT)
    try:
        process_memory._measure(sending, None, [], torch.get_num_threads())  # type: ignore[arg-type]
    finally:
        signal.signal(signal.SIGINT, before)


# -- by hand ----------------------------------------------------------------------------------------------------------
def test_a_profile_made_by_hand_is_split_at_its_peak() -> None:
    def moved(when: float, address: int, size: int, device: int = 0) -> dict[str, Any]:
        return {"name": "[memory]", "ts": when, "args": {"Device Type": device, "Addr": address, "Bytes": size}}

    moments = zip(memory._MARKS, (10.0, 20.0, 30.0, 40.0), strict=True)
    events = [
        *({"name": name, "ts": when} for name, when in moments),
        *(moved(1, 1, 100), moved(2, 2, 30), moved(5, 9, -7)),  # the last was allocated before
        *(moved(12, 3, 50), moved(13, 4, 7), moved(15, 4, -7), moved(13.5, 1, 1000, device=1)),
        *(moved(22, 5, 60), moved(24, 6, 40), moved(25, 3, -50), moved(26, 6, -40)),
        *(moved(32, 7, 500), moved(33, 8, 20), moved(35, 7, -500), moved(45, 2, -30)),
    ]
    marks = memory._Marks({1: "weights", 4: "casts"}, {1: "weights", 3: "gradients", 5: "gradients", 8: "optimizer"})
    found = memory._split(events[::-1], marks, torch.device("cpu"))
    assert found.allocated == 710 and found.reserved is None  # 100 + 30 + 60 + 500 + 20 in the update
    nothing = dict.fromkeys(memory.PARTS, 0)
    at_peak = {"weights": 100, "gradients": 60, "activations": 50, "temporaries": 40, "other": 30}  # at 24
    assert found.parts == {**nothing, **at_peak, "update": 710 - 280}
    held = {"weights": 100, "masters": 0, "gradients": 60, "optimizer": 20, "activations": 50, "casts": 0}
    assert found.held == held


@pytest.mark.parametrize(
    ("more", "parts"),
    [
        ((), {"weights": 1000, "activations": 2, "casts": 4, "temporaries": 200, "update": 600}),
        (  # at the update itself
            ((30, 11, 500), (33, 11, -500)),
            {"weights": 1000, "activations": 2, "casts": 4, "gradients": 200, "temporaries": 500, "update": 100},
        ),
        (((2, 12, 900), (15, 12, -900)), {"weights": 1000, "other": 900, "temporaries": 9}),
        (((2, 12, 900), (11, 12, -900)), {"weights": 1000, "other": 900, "temporaries": 1}),
    ],
)
def test_what_is_allocated_at_a_mark_is_alive_there_and_what_is_freed_is_not(
    more: tuple[tuple[float, int, int], ...], parts: dict[str, int]
) -> None:
    moves = [
        *((1, 10, 1000), (10, 1, 1), (12, 4, 8), (20, 1, -1), (20, 4, -8), (20, 2, 2), (20, 3, 4)),
        *((22, 6, 100), (24, 6, -100), (24, 7, 200), (26, 7, -200), (26, 9, 200), (40, 8, 600), *more),
    ]
    events = [{"name": name, "ts": when} for name, when in zip(memory._MARKS, (10, 20, 30, 40), strict=True)]
    for when, address, size in moves:
        event = {"Device Type": 1, "Addr": address, "Bytes": size}
        events.append({"name": "[memory]", "ts": when, "args": event})
    before, after = {10: "weights", 3: "casts", 4: "casts"}, {9: "gradients", 8: "optimizer"}
    found = memory._split(events, memory._Marks(before, after), torch.device("cuda"))
    assert {name: size for name, size in found.parts.items() if size} == parts
    assert found.allocated == sum(parts.values())
    held = {"weights": 1000, "activations": 2, "casts": 4, "gradients": 200, "optimizer": 600}
    assert found.held == {"masters": 0, **held}


def by_line(batch: int) -> int | None:
    return 100 + 10 * batch


@pytest.mark.parametrize(
    ("limit", "start", "measure", "batches", "batch", "too_large", "verified", "ended"),
    [
        (1000, 4, by_line, [4, 8, 64, 90, 91], 90, 91, True, ""),  # at most eight times as many at once
        (150, 64, by_line, [64, 32, 4, 5, 6], 5, 6, True, ""),
        (50, 2, by_line, [2, 1], 0, 1, True, ""),
        (120, 2, lambda batch: None, [2, 1], 0, 1, True, ""),
        (
            *(10**9, 8, lambda batch: None if batch >= 50 else by_line(batch)),
            *([8, 16, 128, 72, 44, 58, 51, 47, 49, 50], 49, 50, True, ""),
        ),
        (
            *(10**9, 40, lambda batch: None if batch >= 50 else by_line(batch)),
            *([40, 80, 60, 50, 45, 47, 48, 49], 49, 50, True, ""),
        ),
        (  # the line meets the limit at what did not fit
            *(600, 8, lambda batch: None if batch >= 50 else by_line(batch)),
            *([8, 16, 50, 33, 41, 45, 47, 48, 49], 49, 50, True, ""),
        ),
        (8000, 60, lambda batch: batch**2, [60, 120, 84, 90, 89], 89, 90, True, ""),  # by the nearest two
        (20300, 1000, by_line, [1000, 2000, 2020, 2040], 2020, 2040, True, ""),  # one in a hundred more
        (20299, 1000, by_line, [1000, 2000, 2019, 2039], 2019, 2039, True, ""),
        (10**9, 1, lambda batch: 7, [1, *range(2, 13)], 12, None, False, "12 batches were measured"),
        (1000, 4, lambda batch: by_line(batch) if batch < 64 else 10**6, [4, 8, 64], 8, 64, False, "late"),
    ],
)
def test_the_search_for_the_largest_batch_measures_few(
    limit: int, start: int, measure: Any, batches: list[int], batch: int, too_large: int, verified: bool, ended: str
) -> None:
    def stop(batch: int) -> str:
        return "late" if len(asked) == len(batches) else asked.append(batch) or ""

    asked: list[int] = []
    found = largest_batch(limit, measure, start, stop).document()
    assert asked == batches
    assert found["measured"] == {str(one): measure(one) for one in sorted(batches)}
    assert [found[name] for name in ("batch", "too_large", "verified", "ended")] == [batch, too_large, verified, ended]
    assert (found["limit"], found["peak"]) == (limit, measure(batch) if batch else None)


def test_the_operands_of_an_op_are_what_it_multiplies() -> None:
    def of(name: str, *more: Any) -> str:
        found = list(operations._operands(f"aten::{name}", (*given, *more)))
        return "".join("abcde"[next(at for at, one in enumerate(tensors) if one is x)] for x in found)

    tensors = [torch.ones(1) for _ in range(5)]
    given = [torch.ones(1, dtype=torch.int64), *tensors, 3]
    assert [of(name) for name in ("mm", "addmm", "baddbmm", "addbmm")] == ["abcde", "bcde", "bcde", "bcde"]
    assert of("convolution") == "ab" and of("_scaled_dot_product_attention") == "abc"
    assert of("_scaled_dot_product_attention_backward") == "abcd"
    wanted = {(True, True): "abc", (True, False): "ac", (False, True): "ab", (False, False): "a"}
    assert {mask: of("convolution_backward", [*mask, True]) for mask in wanted} == wanted
