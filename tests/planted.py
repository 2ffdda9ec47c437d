"""Faults planted into a small training, by which a monitor is tried: each has the finding and the place to be named."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lowp
from lowp.monitoring import Alarm

MODES = ("plain", "compiled", "ddp")
WIDTH, CLASSES, INPUTS = 64, 8, 16
BEGIN = 10  # the step at which faults begin that do not begin at once
WITHIN = 50  # steps after the beginning within which they are to be named


class Block(nn.Module):
    """A residual block; its result is multiplied by `factor`, and cut from the graph if it `is_cut`."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.ReLU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.is_cut = False

    def forward(self, x: Tensor) -> Tensor:
        found = self.down(self.act(self.up(self.norm(x))))
        return x + (found.detach() if self.is_cut else found)


class Network(nn.Module):
    """Layers of every usual kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(INPUTS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.batch, self.head = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.batch(x))


class Run:
    """A training of the network on random inputs and the classes that a fixed layer gives them."""

    def __init__(self, mode: str, fault: Fault | None = None, precision: str | None = None) -> None:
        torch.manual_seed(0)
        self.mode = mode
        self.rank = torch.distributed.get_rank() if mode == "ddp" else 0
        self.model = Network()
        self.teacher = nn.Linear(INPUTS, CLASSES)
        self.data = torch.Generator().manual_seed(1 + self.rank)
        self.count, self.batches, self.divides = 64, 1, True
        self.clip = math.inf
        self.unscales_first = True
        self.autocast: torch.dtype | None = None
        self.scaler: Any = None
        self.precision = None if precision is None else lowp.Precision(precision)
        self.average: AveragedModel | None = None
        self.updates_average = True
        self.reduction = "mean"
        self.scale_of_inputs = 1.0
        self.before: Callable[[int], None] = lambda step: None
        self.after: Callable[[Tensor], None] = lambda logits: None
        self.monitor: lowp.Monitor | None = None
        self.alarms: list[Alarm] = []
        self.optimizer: Any = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        if fault is not None:
            fault.plant(self)
        if self.precision is not None:
            self.model, self.optimizer = self.precision.prepare(self.model, self.optimizer)
        self.called = self._wrapped()

    def _wrapped(self) -> Any:
        if self.mode == "compiled":
            return torch.compile(self.model, backend="aot_eager")
        if self.mode == "ddp":
            return DistributedDataParallel(self.model, find_unused_parameters=True)
        return self.model

    def watch(self, **given: Any) -> lowp.Monitor:
        """Begin to watch."""
        models = self.called if self.average is None else {"model": self.called, "ema": self.average}
        given = {"scaler": self.scaler, "precision": self.precision, "on_alarm": self.alarms.append, **given}
        self.monitor = lowp.Monitor(models, self.optimizer, **given)
        return self.monitor

    def step(self, step: int) -> None:
        """Take a step."""
        self.before(step)
        self.optimizer.zero_grad()
        for _ in range(self.batches):
            loss = self._loss()
            if self.divides:
                loss = loss / self.batches
            if self.precision is not None:
                self.precision.backward(loss)
            else:
                (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.clip < math.inf:
            if self.scaler is not None and self.unscales_first:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        stepper = self.precision or self.scaler
        self.optimizer.step() if stepper is None else stepper.step(self.optimizer)
        if self.scaler is not None:
            self.scaler.update()
        if self.average is not None and self.updates_average:
            self.average.update_parameters(self.model)

    def _loss(self) -> Tensor:
        x = torch.randn(self.count, INPUTS, generator=self.data)
        with torch.no_grad():
            labels = self.teacher(x).argmax(1)
        x = (x * self.scale_of_inputs).to(self.model.head.weight.dtype)
        if self.precision is not None:
            with self.precision.autocast():
                return F.cross_entropy(self.called(x), labels)
        with torch.autocast("cpu", self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            logits = self.called(x)
        self.after(logits.detach())
        return F.cross_entropy(logits.float(), labels, reduction=self.reduction)

    def train(self, steps: int, until: Fault | None = None) -> list[Alarm]:
        """Train, alone at most until a fault is named, and return the alarms; ranks must take the same steps."""
        for step in range(steps):
            if until is not None and self.mode != "ddp" and until.named(self.alarms):
                break
            self.step(step)
        if self.monitor is not None:
            self.monitor.close()
            assert self.monitor.failure is None, self.monitor.failure
        return self.alarms


@dataclass(frozen=True)
class Fault:
    """A fault: its name, the findings that name it, what the layer that is named begins with, and how it is planted."""

    name: str
    ids: tuple[str, ...]
    place: str
    plant: Callable[[Run], None]
    modes: tuple[str, ...] = MODES
    begin: int = 0

    def named(self, alarms: list[Alarm]) -> Alarm | None:
        """Return the first alarm that names the fault in time; None if there is none."""
        for one in alarms:
            places = (one.layer, *one.others)
            if one.id in self.ids and any(self.place in place for place in places) and one.step < self.begin + WITHIN:
                return one
        return None


def _once(run: Run, change: Callable[[], object], until: int = BEGIN) -> None:
    """Change something before a step."""
    run.before = lambda step: change() if step == until else None  # type: ignore[assignment,return-value]


def _adam(run: Run, **given: Any) -> None:
    run.optimizer = torch.optim.AdamW(run.model.parameters(), **given)


# -- 16-bit weights and their optimizers ------------------------------------------------------------------------------
def pure_bf16(run: Run) -> None:
    run.model.bfloat16()
    _adam(run, lr=1e-3)


def small_rate(run: Run) -> None:
    run.model.bfloat16()
    run.optimizer = torch.optim.SGD(run.model.parameters(), lr=1e-4)


def wrong_decay(run: Run) -> None:
    run.model.bfloat16()
    _adam(run, lr=1e-2, weight_decay=20.0)


def widened_state(run: Run) -> None:
    run.model.bfloat16()
    _adam(run, lr=1e-2)

    def load() -> None:
        saved = deepcopy(run.optimizer.state_dict())
        run.model.float()
        run.optimizer.load_state_dict(saved)

    _once(run, load)


def replaced_parameters(run: Run) -> None:
    _once(run, lambda: run.model.load_state_dict(deepcopy(run.model.state_dict()), assign=True))


def left_frozen(run: Run) -> None:
    _once(run, lambda: run.model.blocks[1].requires_grad_(False))


# -- the loss scale ---------------------------------------------------------------------------------------------------
def _fp16(run: Run, **given: Any) -> None:
    run.autocast, run.scaler = torch.float16, torch.amp.GradScaler("cpu", **given)


def no_scaler(run: Run) -> None:
    run.autocast, run.count = torch.float16, 4096


def forgotten_scaler(run: Run) -> None:
    _fp16(run)
    run.called = run.model
    for _ in range(5):
        run.step(-1)
    run.scaler = torch.amp.GradScaler("cpu")


def clipped_while_scaled(run: Run) -> None:
    _fp16(run)
    run.clip, run.unscales_first = 1.0, False


def restless_scale(run: Run) -> None:
    _fp16(run, growth_interval=1)


# -- numbers that are too large ---------------------------------------------------------------------------------------
def beyond_fp16(run: Run) -> None:
    _fp16(run)

    def enlarge() -> None:
        with torch.no_grad():
            run.model.blocks[1].up.weight.mul_(5e4)
            run.model.blocks[1].down.weight.div_(5e4)

    _once(run, enlarge)


def nan_in_a_layer(run: Run) -> None:
    def spoil() -> None:
        with torch.no_grad():
            run.model.blocks[1].up.weight[0, 0] = math.nan

    _once(run, spoil)


def eaten_batch_norm(run: Run) -> None:
    _once(run, lambda: run.model.batch.running_var.fill_(math.inf))


def dead_relu(run: Run) -> None:
    def kill() -> None:
        with torch.no_grad():
            run.model.blocks[1].up.bias.fill_(-65504.0)

    _once(run, kill)


def growing(run: Run) -> None:
    def grow(step: int) -> None:
        with torch.no_grad():
            run.model.blocks[1].down.weight.mul_(1.4)

    run.before = grow


def cut_off(run: Run) -> None:
    run.precision = lowp.Precision("flex16+5")

    def alternate(step: int) -> None:
        run.scale_of_inputs = 4.0**step

    run.before = alternate


# -- learning ---------------------------------------------------------------------------------------------------------
def large_rate(run: Run) -> None:
    _adam(run, lr=1.0)


def bad_batch(run: Run) -> None:
    def change(step: int) -> None:
        run.reduction = "sum" if step == BEGIN + 10 else "mean"

    run.before = change


def undivided(run: Run) -> None:
    run.batches, run.divides = 4, False


def cut_graph(run: Run) -> None:
    run.model.blocks[1].is_cut = True


# -- copies that should agree -----------------------------------------------------------------------------------------
def stale_average(run: Run) -> None:
    run.average, run.updates_average = AveragedModel(run.model, multi_avg_fn=get_ema_multi_avg_fn(0.99)), False


def average_in_bf16(run: Run) -> None:
    run.average = AveragedModel(run.model, avg_fn=lambda old, new, _: old + 1e-4 * (new - old)).bfloat16()


def rank_apart(run: Run) -> None:
    def part() -> None:
        with torch.no_grad():
            run.model.head.weight.add_(1e-3 * run.rank)

    _once(run, part)


def rollout_apart(run: Run) -> None:
    def compare(logits: Tensor) -> None:
        ours = logits.log_softmax(1)
        others = lowp.quantize(logits.float(), "e4m3fn").log_softmax(1)
        if run.monitor is not None:
            run.monitor.compare("rollout", ours, others)

    run.after = compare


FAULTS = (
    Fault("norms frozen in pure bf16", ("N101",), "norm", pure_bf16),
    Fault("a learning rate too small for bf16", ("N101",), "up.weight", small_rate),
    Fault("a weight decay too large, bf16 weights", ("N104",), "weight", wrong_decay),
    Fault("Adam's bf16 state widened by a load", ("N501",), "exp_avg", widened_state, begin=BEGIN),
    Fault("parameters replaced by load_state_dict(assign=True)", ("N502",), "weight", replaced_parameters, begin=BEGIN),
    Fault("requires_grad_(False) not taken back", ("N502",), "blocks.1", left_frozen, begin=BEGIN),
    Fault("fp16 autocast without a scaler", ("N206",), "", no_scaler),
    Fault("a scaler not saved", ("N207",), "loss scale", forgotten_scaler),
    Fault("clipping before unscale_", ("N208",), "gradients", clipped_while_scaled),
    Fault("a loss scale that grows too fast", ("N402",), "loss scale", restless_scale),
    Fault("an overflow in fp16", ("N205", "N401"), "blocks.1.up", beyond_fp16, begin=BEGIN),
    Fault("NaN in a layer", ("N401",), "blocks.1.up", nan_in_a_layer, begin=BEGIN),
    Fault("BatchNorm eaten by inf", ("N401",), "batch.running_var", eaten_batch_norm, begin=BEGIN),
    Fault("a dead ReLU", ("N302", "N102"), "blocks.1", dead_relu, begin=BEGIN),
    Fault("activations that grow", ("N301",), "blocks.1", growing),
    Fault("saturation under a shared exponent", ("N303",), "", cut_off),
    Fault("a learning rate too large", ("N103",), "weight", large_rate),
    Fault("a batch whose loss is summed", ("N403",), "loss", bad_batch, begin=BEGIN + 10),
    Fault("gradient accumulation without division", ("N404",), "loss", undivided),
    Fault("a layer cut from the graph", ("N102",), "blocks.1", cut_graph),
    Fault("a stale EMA", ("N504",), "ema", stale_average),
    Fault("an EMA in bf16", ("N504",), "ema", average_in_bf16),
    Fault("rollout and training apart", ("N505",), "rollout", rollout_apart),
    Fault("a rank apart", ("N503",), "head.weight", rank_apart, modes=("ddp",), begin=BEGIN),
)


def tried(mode: str, **given: Any) -> Iterator[tuple[Fault, list[Alarm]]]:
    """Run every fault of a mode under a monitor; yield it with the alarms."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fault in FAULTS:
            if mode in fault.modes:
                torch.compiler.reset()
                run = Run(mode, fault)
                run.watch(**given)
                yield fault, run.train(fault.begin + WITHIN, fault)
