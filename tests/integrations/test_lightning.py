"""Lightning's Trainer and Fabric in a precision of lowp: fit, validate, resume, several optimizers, loggers."""

from __future__ import annotations

import importlib.util
import logging
import math
import pickle
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lowp

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("lightning"), reason="pip install lightning"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
    pytest.mark.filterwarnings("ignore:.training_step. returned .None"),
    pytest.mark.filterwarnings("ignore:Experiment logs directory"),
]
PRECISIONS = ["fp32", "fp16", "bf16", "16-mixed", "fp8", "bf16-storage", "fp16-storage", "dfp16", "flex16+5"]
SAMPLE = ["16-mixed", "bf16-storage", "flex16+5"]


@pytest.fixture(autouse=True)
def lightning_is_quiet() -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    yield


def loader(shuffle: bool = True) -> DataLoader[Any]:
    x = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(x, x[:, :3].argmax(1)), batch_size=8, shuffle=shuffle)


def module(**methods: Any) -> Any:
    """Return a LightningModule as tutorials write it, with other methods in the place of its own."""
    import lightning

    class Net(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            first, last = nn.Linear(10, 32), nn.Linear(32, 3)
            self.net = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), last)
            self.losses: list[float] = []

        def loss(self, batch: Any) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.loss(batch)
            self.losses.append(loss.item())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("val_loss", self.loss(batch))

        def predict_step(self, batch: Any, index: int) -> Any:
            return self.net(batch[0])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    return type("Net", (Net,), methods)()


def plugin(precision: Any, **options: Any) -> Any:
    from lowp.integrations.lightning import LowpPrecision

    return LowpPrecision(precision, **options)


def trainer(of: Any, epochs: int = 2, folder: Path | None = None, **options: Any) -> Any:
    """Return a Trainer with the plugin of a precision; `options` are the Trainer's."""
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    saving = [] if folder is None else [ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)]
    usual: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    usual |= {"enable_checkpointing": bool(saving), "callbacks": saving}
    usual |= {"plugins": [plugin(of) if isinstance(of, str) else of]}
    return lightning.Trainer(max_epochs=epochs, accelerator="cpu", devices=1, **{**usual, **options})


def fit(precision: Any, model: Any = None, path: Path | None = None, **options: Any) -> Any:
    """Fit a module; return it and the precision."""
    import lightning

    lightning.seed_everything(0, verbose=False)
    model, run = model or module(), trainer(precision, **options)
    run.fit(model, loader(), loader(False), ckpt_path=path)
    return model, getattr(run.precision_plugin, "lowp", None)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def resumes(name: str, tmp_path: Path) -> None:
    usual: dict[str, Any] = {"gradient_clip_val": 1.0, "accumulate_grad_batches": 2}
    whole, used = fit(name, folder=tmp_path, **usual)
    later, again = fit(name, folder=tmp_path / "later", path=tmp_path / "epoch=0.ckpt", **usual)
    assert len(whole.losses) == 16 and whole.losses[8:] == later.losses and same(whole, later)
    assert used.steps == again.steps == 8 and used.scale == again.scale
    assert used.preset.name == ("fp16" if name == "16-mixed" else name)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_run_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    resumes(name, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(PRECISIONS) - set(SAMPLE)))
def test_a_run_in_any_precision_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    resumes(name, tmp_path)


@pytest.mark.parametrize(
    ("given", "name"),
    [("16-mixed", "fp16"), (16, "fp16"), ("16", "fp16"), ("bf16-mixed", "bf16"), ("32-true", "fp32"), (32, "fp32")],
)
def test_lightning_s_own_names_of_precisions_are_known(given: Any, name: str) -> None:
    assert plugin(given).lowp.preset.name == name


def test_fp32_is_lightning_itself_and_fp16_is_not() -> None:
    plain, _ = fit("fp32", plugins=[])
    assert same(plain, fit("fp32")[0])
    model, used = fit("16-mixed")
    assert not same(plain, model) and used.report().ops and used.scale > 1


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_gradients_are_clipped_without_the_loss_scale(algorithm: str) -> None:
    seen: list[float] = []

    def look(self: Any, optimizer: Any) -> None:
        seen.append(float(nn.utils.get_total_norm([one.grad for one in self.parameters()])))

    def zero_grad(self: Any, optimizer: Any) -> None:
        if all(one.grad is not None for one in self.parameters()):
            look(self, optimizer)

    options: dict[str, Any] = {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": algorithm, "epochs": 1}
    model = module(on_before_optimizer_step=look, on_before_zero_grad=zero_grad)
    fit(plugin("fp16", loss_scale=1024), model, **options)
    before, after = seen[::2], seen[1::2]
    assert len(seen) == 15 and all(0.05 < norm < 10 for norm in before)
    count = sum(one.numel() for one in model.parameters())
    assert all(norm < 1e-3 * (1.01 if algorithm == "norm" else math.sqrt(count)) for norm in after)


def test_skipped_steps_change_nothing_and_are_logged_beside_the_loss_scale(tmp_path: Path) -> None:
    from lightning.pytorch.loggers import CSVLogger

    def training_step(self: Any, batch: Any, index: int) -> Tensor:
        return self.loss(batch) * (1e30 if index == 3 else 1.0)  # type: ignore[no-any-return]

    logger = CSVLogger(tmp_path, name="", version="")
    used = plugin("fp16", loss_scale="dynamic(1024)", monitor={"max_overhead": None})
    model = module(training_step=training_step)
    fit(used, model, epochs=1, logger=logger, log_every_n_steps=2, num_sanity_val_steps=0)
    assert used.lowp.skipped_steps == 1 and used.lowp.scale == 512
    assert all(one.isfinite().all() for one in model.state_dict().values())
    head, *rows = (line.split(",") for line in (tmp_path / "metrics.csv").read_text().splitlines())
    found = [dict(zip(head, row, strict=True)) for row in rows]
    scales = [(row["step"], row["loss_scale"], row["skipped_steps"]) for row in found if row["loss_scale"]]
    assert scales == [("1", "1024.0", "0"), ("3", "512.0", "1"), ("5", "512.0", "1"), ("7", "512.0", "1")]
    assert used.monitor.step == 8 and any(row["lowp/net/activation"] for row in found)


@pytest.mark.parametrize("asked", [False, True])
def test_a_training_is_watched_if_that_is_asked_for(asked: bool) -> None:
    used = plugin("bf16", monitor=asked)
    fit(used, epochs=1, limit_train_batches=1)
    assert (used.monitor is not None) == asked and (not asked or used.monitor.step == 1)


def test_validation_and_predictions_run_in_the_precision() -> None:
    model = module()
    run = trainer("bf16")
    assert run.validate(model, loader(False), verbose=False)[0]["val_loss"] > 0.5
    assert {one.dtype for one in run.predict(model, loader(False))} == {torch.bfloat16}
    assert run.precision == "bf16"


# -- several optimizers -----------------------------------------------------------------------------------------------
def two(self: Any) -> Any:
    return [torch.optim.SGD(self.net[0].parameters(), lr=0.1), torch.optim.AdamW(self.net[4].parameters(), lr=1e-2)]


def together(self: Any, batch: Any, index: int) -> None:
    optimizers = self.optimizers()
    for one in optimizers:
        one.zero_grad()
    loss = self.loss(batch)
    self.losses.append(loss.item())
    self.manual_backward(loss)
    for one in optimizers:
        self.clip_gradients(one, gradient_clip_val=0.01, gradient_clip_algorithm="norm")
        one.step()


def in_turns(self: Any, batch: Any, index: int) -> None:
    for one in self.optimizers():
        one.zero_grad()
        loss = self.loss(batch)
        self.losses.append(loss.item())
        self.manual_backward(loss)
        one.step()


@pytest.mark.parametrize("step", [together, in_turns])
def test_several_optimizers_step_by_hand(step: Any) -> None:
    def losses(precision: Any) -> tuple[list[float], Any]:
        model = module(training_step=step, configure_optimizers=two)
        model.automatic_optimization = False
        return fit(precision, model, epochs=1)[0].losses, precision

    plain, _ = losses("fp32")
    scaled, used = losses(plugin("fp16", loss_scale="dynamic(1024)"))
    assert scaled == pytest.approx(plain, abs=2e-2) and scaled != plain
    assert used.state_dict()["steps"] == (8 if step is together else 16)


def test_an_optimizer_that_computes_its_gradients_again_runs_without_a_loss_scale() -> None:
    def lbfgs(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1e-3, max_iter=2)

    def optimizer_step(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        results.append(float(optimizer.step(closure)))

    results: list[float] = []
    model, used = fit("bf16", module(configure_optimizers=lbfgs, optimizer_step=optimizer_step), epochs=1)
    assert len(model.losses) > 8 and used.steps == len(results) == 8
    assert set(results) <= set(model.losses)
    with pytest.raises(lowp.Misuse, match="a closure computes its loss without the loss scale"):
        fit("fp16", module(configure_optimizers=lbfgs), epochs=1)


def test_a_module_may_have_a_backward_of_its_own_and_batches_without_a_loss() -> None:
    def backward(self: Any, loss: Tensor) -> None:
        loss.backward()

    def every_second(self: Any, batch: Any, index: int) -> Any:
        given.append(self.loss(batch) if index % 2 else None)
        return given[-1]

    def optimizer_step(self: Any, epoch: int, index: int, optimizer: Any, closure: Any) -> None:
        results.append(optimizer.step(closure))

    given, results = list[Tensor | None](), list[Tensor | None]()
    model = module(backward=backward, training_step=every_second, optimizer_step=optimizer_step)
    used = fit("fp16", model, epochs=1, gradient_clip_val=1.0)[1]
    assert used.steps == 4 and used.skipped_steps == 0
    assert [one is None for one in given] == [True, False] * 4
    for one, result in zip(given, results, strict=True):
        assert result is None if one is None else torch.equal(result, one)


def test_a_backward_of_the_module_s_own_gets_its_arguments_between_the_hooks_of_lightning() -> None:
    heard: list[Any] = []

    def by_hand(self: Any, batch: Any, index: int) -> None:
        self.manual_backward(self.loss(batch), "once", retain=False)

    def backward(self: Any, loss: Tensor, *given: Any, **named: Any) -> None:
        heard.extend((given, named))
        loss.backward()

    hooks = {"on_before_backward": lambda self, loss: heard.append("before")}
    hooks |= {"on_after_backward": lambda self: heard.append("after")}  # type: ignore[dict-item, misc]
    model = module(training_step=by_hand, backward=backward, **hooks)
    model.automatic_optimization = False
    fit("fp16", model, epochs=1, limit_train_batches=1)
    assert heard == ["before", ("once",), {"retain": False}, "after"]


@pytest.mark.parametrize("with_trainer", [True, False], ids=["trainer", "fabric"])
def test_arguments_of_a_backward_pass_count_by_place_as_by_name(with_trainer: bool) -> None:
    used, weight = plugin("fp16", loss_scale=8), nn.Parameter(torch.ones(2))
    used._has_trainer = with_trainer
    optimizer, model = (torch.optim.SGD([weight]),) if with_trainer else (), module()
    loss = 3 * weight
    used.backward(loss, model, *optimizer, torch.tensor([1.0, 2.0]), True)
    used.backward(loss, model, *optimizer, torch.tensor([1.0, 2.0]), inputs=[weight])  # the graph was kept
    assert weight.grad.tolist() == [48.0, 96.0]
    with pytest.raises(TypeError, match="too many positional arguments"):
        used.backward(loss, model, *optimizer, None, True, False, None, 1)


def test_a_fused_optimizer_trains_as_torch_s_other_one() -> None:
    def adam(self: Any, fused: bool) -> Any:
        assert self.trainer.scaler.get_scale() > 1
        return torch.optim.Adam(self.parameters(), lr=1e-2, fused=fused)

    runs = [partialmethod(adam, fused=fused) for fused in (True, False)]
    losses = [fit("fp16", module(configure_optimizers=one), gradient_clip_val=0.5)[0].losses for one in runs]
    assert losses[0] == pytest.approx(losses[1], abs=1e-3)


def test_an_epoch_without_backward_passes_steps_nothing() -> None:
    from lightning.pytorch.callbacks import StochasticWeightAveraging

    averaging = StochasticWeightAveraging(1e-2, swa_epoch_start=1)  # computes BatchNorm's statistics in such an epoch
    model, used = fit("fp16", epochs=3, callbacks=[averaging])
    assert used.steps == 24 and model.net[1].running_mean.isfinite().all()


# -- Fabric -----------------------------------------------------------------------------------------------------------
def fabric(name: str, folder: Path, resume: bool = False) -> Any:
    import lightning

    precision = plugin(name)
    one = lightning.Fabric(accelerator="cpu", devices=1, plugins=precision)
    lightning.seed_everything(0, verbose=False)
    model = module().net
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if precision.lowp.policy.parameters is not None:
        model, optimizer = precision.lowp.prepare(model, optimizer)
    model, optimizer = one.setup(model, optimizer)
    data = one.setup_dataloaders(loader())
    parts = {"model": model, "optimizer": optimizer, "precision": precision}
    if resume:
        one.load(folder / "half.ckpt", parts)
    losses = []
    for epoch in range(1 if resume else 2):
        for x, y in data:
            optimizer.zero_grad()
            output = model(x)
            assert output.dtype == torch.float32
            loss = nn.functional.cross_entropy(output, y)
            one.backward(loss)
            one.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            losses.append(loss.item())
        if epoch == 0 and not resume:
            one.save(folder / "half.ckpt", parts)
    return losses, model, precision.lowp.steps


@pytest.mark.parametrize("name", ["fp16", "bf16-storage", "flex16+5"])
def test_a_run_of_fabric_resumes_with_the_same_bits(name: str, tmp_path: Path) -> None:
    losses, model, steps = fabric(name, tmp_path)
    later, again, _ = fabric(name, tmp_path, resume=True)
    assert steps == 16 and later == losses[8:] and same(model, again)


def test_a_model_of_fabric_returns_fp32_inside_of_what_holds_its_results() -> None:
    class Output(NamedTuple):
        logits: Any
        loss: Any

    half, double = torch.ones(2, dtype=torch.bfloat16), torch.ones(2, dtype=torch.float64)
    given = {"list": [half, 3], "own": OrderedDict(named=Output((half, double), None))}
    found = plugin("bf16").convert_output(given)
    assert [*found] == ["list", "own"] and found["list"][0].dtype == torch.float32 and found["list"][1] == 3
    assert type(found["own"]) is OrderedDict and type(found["own"]["named"]) is Output
    (logits, wide), loss = found["own"]["named"]
    assert logits.dtype == torch.float32 and wide is double and loss is None


# -- the plugin by itself ---------------------------------------------------------------------------------------------
def given_trainer(**options: Any) -> Any:
    return SimpleNamespace(**{"loggers": [], "log_every_n_steps": 1, "global_step": 7, **options})


def test_the_scaler_is_shown_where_the_loss_is_scaled() -> None:
    used = plugin("fp16", loss_scale=8)
    assert used.scaler is used.lowp.scaler and plugin("bf16").scaler is None
    assert repr(used) == "LowpPrecision('fp16')" and used.precision == "fp16"


@pytest.mark.filterwarnings("ignore:nothing ran in bf16 in the first step")
def test_a_step_of_fabric_returns_what_its_closure_has_returned() -> None:
    weight = nn.Parameter(torch.ones(2))

    def closure() -> Tensor:
        weight.grad = torch.ones(2)
        return weight.sum()

    found = plugin("bf16").optimizer_step(torch.optim.SGD([weight], lr=0.5), closure=closure)
    assert found.item() == 2.0 and weight.tolist() == [0.5, 0.5]


@pytest.mark.parametrize("sinks", [None, "one", "list", "tuple"])
def test_a_monitor_has_the_sinks_that_are_given_and_the_loggers(
    sinks: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Monitor:
        def __init__(self, *given: Any, **options: Any) -> None:
            self.given, self.options, self.closed = given, options, 0

        def close(self) -> None:
            self.closed += 1

    monkeypatch.setattr(lowp, "Monitor", Monitor)
    first, second, model = object(), object(), nn.Linear(2, 2)
    watch: dict[Any, Any] = {None: {}, "one": {"sinks": first}, "list": {"sinks": [first, second]}}
    watch["tuple"], wanted = {"sinks": (first, second)}, {None: [], "one": [first]}.get(sinks, [first, second])
    used, optimizer = (
        plugin("bf16", monitor={"patience": 3, **watch[sinks]}),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert used.connect(model, [], [3]) == (model, [], [3]) and used.monitor is None  # nothing is trained
    used.teardown()
    _, optimizers, schedules = used.connect(model, [optimizer], [3])
    assert len(optimizers) == 1 and schedules == [3] and used.monitor.given == (model, optimizers)
    assert used.monitor.options == {"precision": used.lowp, "patience": 3, "sinks": [*wanted, used]}
    used.teardown()
    assert used.monitor.closed == 1
    for asked, options in ((False, {}), (False, {"monitor": False}), (True, {"monitor": True})):
        used = plugin("bf16", **options)
        used.connect(model, [optimizer], [])
        assert (used.monitor is not None) is asked
        assert not asked or used.monitor.options == {"precision": used.lowp, "sinks": [used]}


def test_loss_scales_are_logged_as_often_as_the_trainer_logs() -> None:
    logged: list[Any] = []
    logger = SimpleNamespace(log_metrics=lambda numbers, step: logged.append((numbers, step)))
    used = plugin("fp16", loss_scale=8)
    for every, steps, is_logged in ((0, 2, False), (2, 2, True), (2, 3, False), (None, 2, False), (1, 3, True)):
        used.lowp.steps = steps
        logged.clear()
        used._tell(given_trainer(loggers=[logger, logger], log_every_n_steps=every))
        assert logged == [({"loss_scale": 8.0, "skipped_steps": 0}, 7)] * 2 * is_logged
    other = plugin("bf16")
    other._tell(given_trainer(loggers=[logger]))
    assert len(logged) == 2
    other.log({"a": 1.0}, 3)
    assert logged[2:] == [({"a": 1.0}, 3)]


def test_the_hooks_of_a_backward_pass_are_called_for_a_trainer_alone() -> None:
    called: list[str] = []

    def call(trainer: Any, name: str, *given: Any) -> None:
        called.append(name)

    used, loss = plugin("fp16"), torch.ones(1)
    assert used.pre_backward(loss, None) is loss and used.post_backward(loss, None) is loss
    used.connect(nn.Linear(1, 1), [], [])
    model = module()
    hooks = {"_call_callback_hooks": call, "_call_lightning_module_hook": call}
    with pytest.MonkeyPatch.context() as patch:
        for package in ("lightning.pytorch.trainer.call", "lightning.pytorch.plugins.precision.precision.call"):
            for name, hook in hooks.items():
                patch.setattr(f"{package}.{name}", hook)
        model._trainer, model._fabric = SimpleNamespace(), None
        patch.setattr(type(model), "trainer", model._trainer)
        used.pre_backward(loss, model)
        assert set(called) == {"on_before_backward"}
        called.clear()
        used.post_backward(loss, model)
        assert set(called) == {"on_after_backward"}


def test_a_state_of_as_many_ranks_has_the_random_state_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.integrations import lightning as integration

    used = plugin("fp16", loss_scale="dynamic(8)")
    used.lowp.scaler.scale(torch.ones(1))
    state = used.state_dict()
    assert len(state["random of ranks"]) == 1 and "random" not in state
    loaded: list[Any] = []
    monkeypatch.setattr(used.lowp, "load_state_dict", loaded.append)
    own = used.lowp.state_dict()["random"]
    for world, rank, ranks, wanted in (
        (1, 0, ["a"], "a"),
        (2, 1, ["a", "b"], "b"),
        (1, 0, ["a", "b"], None),
        (2, 1, ["a"], None),
    ):
        monkeypatch.setattr(integration, "_place", lambda rank=rank, world=world: (rank, world))
        used.load_state_dict({**state, "random of ranks": ranks})
        assert loaded[-1].keys() == {*state, "random"} - {"random of ranks"}
        found = loaded[-1]["random"]
        assert found == wanted if wanted else found.keys() == own.keys()
        assert used._late is None
    used.load_state_dict({name: one for name, one in state.items() if name != "random of ranks"})
    used._load_late()
    assert len(loaded) == 5
    later = {**state, "exponents": {"version": 2}, "random of ranks": ["a", "b"]}
    used.load_state_dict(later)
    used._load_late()
    used._load_late()  # once, with the random state of now
    assert len(loaded) == 7 and loaded[5]["random"] == "b" and loaded[6]["random"] != "b"
    assert loaded[6]["exponents"] == {"version": 2}


def test_ranks_are_counted_where_there_are_some(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowp.integrations import lightning as integration

    assert integration._place() == (0, 1) and integration._of_all_ranks("a") == ["a"]
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_gather_object", lambda values, own: values.__setitem__(0, "other"))
    assert integration._place() == (1, 2) and integration._of_all_ranks("a") == ["other", "a"]


# -- what is refused --------------------------------------------------------------------------------------------------
def test_what_cannot_be_meant_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(lowp.UnknownName, match="unknown precision 'fp17'; did you mean fp16"):
        plugin("fp17")
    with pytest.raises(lowp.InvalidInput, match="'bf16-true' trains parameters in 16 bits without masters, so that"):
        plugin("bf16-true")
    with pytest.raises(lowp.InvalidInput, match="loss_scale, seed given beside a Precision, which has its own"):
        plugin(lowp.Precision("fp16"), loss_scale=8, seed=1)
    with pytest.raises(ValueError, match=r"Received both .precision=16-mixed. and .plugins=LowpPrecision\('fp16'\)."):
        trainer("fp16", precision="16-mixed")
    with pytest.raises(lowp.InvalidInput, match="was given momentum, and takes a closure alone: set what"):
        plugin("fp16").optimizer_step(torch.optim.SGD([nn.Parameter(torch.ones(1))]), momentum=0.5)
    fit("fp16", folder=tmp_path, epochs=1)
    with pytest.raises(lowp.InvalidInput, match="the checkpoint was trained in fp16 and this run is in bf16"):
        fit("bf16", folder=tmp_path, path=tmp_path / "epoch=0.ckpt")


_BOTH = """
import lightning, logging, torch
from lowp.integrations.lightning import LowpPrecision
import pytorch_lightning
from torch import nn
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
norms = []
class Net(pytorch_lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)
    def training_step(self, batch, index):
        return self.net(batch).square().mean()
    def on_before_zero_grad(self, optimizer):
        norms.extend(one.grad.norm().item() for one in self.parameters() if one.grad is not None)
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
plugin = LowpPrecision("fp16")
trainer = pytorch_lightning.Trainer(
    plugins=[plugin], accelerator="cpu", max_epochs=1, gradient_clip_val=1e-3, **quiet)
trainer.fit(Net(), torch.ones(4, 2, 4))
print(plugin.lowp.steps, max(norms) < 1.1e-3, isinstance(plugin, LowpPrecision), type(plugin).__qualname__)
"""


@pytest.mark.slow
def test_either_package_of_lightning_s_is_served_where_both_are_imported() -> None:
    ran = subprocess.run([sys.executable, "-W", "ignore", "-c", _BOTH], capture_output=True, text=True)
    assert ran.stdout == "4 True True LowpPrecision\n", ran.stderr


def test_the_class_of_the_plugin_is_one_of_lightning_s_for_its_command_line() -> None:
    from lightning.pytorch.plugins import Precision

    from lowp.integrations.lightning import LowpPrecision

    assert issubclass(LowpPrecision, Precision)


@pytest.mark.parametrize(
    ("imported", "installed", "served"),
    [
        (["lightning.pytorch", "lightning"], [], ["lightning.pytorch"]),
        (["pytorch_lightning", "lightning_fabric"], [], ["pytorch_lightning"]),  # which is made of it
        (["lightning_fabric"], ["lightning"], ["lightning_fabric"]),
        (["lightning.pytorch", "pytorch_lightning"], [], ["lightning.pytorch", "pytorch_lightning"]),
        (
            ["lightning.pytorch", "pytorch_lightning", "lightning_fabric"],
            [],
            ["lightning.pytorch", "pytorch_lightning"],
        ),
        ([], ["lightning", "pytorch_lightning"], ["lightning.pytorch"]),
        ([], ["pytorch_lightning", "lightning_fabric"], ["pytorch_lightning"]),
        ([], ["lightning_fabric"], ["lightning_fabric"]),
        ([], [], ["lightning.pytorch"]),  # whose import says what is missing
    ],
)
def test_the_packages_that_are_imported_are_served_or_else_the_first_that_is_installed(
    imported: list[str], installed: list[str], served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from lowp.integrations import lightning as integration

    monkeypatch.setattr(integration, "sys", SimpleNamespace(modules=imported))
    monkeypatch.setattr(integration, "find_spec", installed.__contains__)
    monkeypatch.setattr(integration, "import_module", lambda name: SimpleNamespace(Precision=name))
    assert integration._lightnings() == [f"{one}.plugins.precision" for one in served]


def test_a_plugin_can_be_pickled_and_is_one_of_lightning_s_and_of_lowp_s() -> None:
    from lightning.pytorch.plugins.precision import Precision

    from lowp.integrations.lightning import LowpPrecision

    class Mine(LowpPrecision):
        """A plugin of one's own."""

    one = pickle.loads(pickle.dumps(plugin("e5m7")))
    assert isinstance(one, Precision) and isinstance(one, LowpPrecision) and one.lowp.preset.name == "e5m7"
    assert isinstance(Mine("fp8"), Precision) and type(Mine("fp8")).__name__ == "Mine"


def test_a_plugin_is_pickled_as_the_class_that_a_script_can_name() -> None:
    from lowp.integrations import lightning as integration

    plain, other = integration.LowpPrecision, type("Precision", (), {})
    mine = type("Mine", (plain,), {})
    for cls, named in ((plain, plain), (mine, mine), (integration._joined(plain, (other,)), plain)):
        one = cls("fp16")
        one.monitor, one._loggers = object(), [object()]
        make, given, state = one.__reduce__()
        assert given == (named,) and type(make(*given)) is named
        assert state == {**one.__dict__, "monitor": None, "_loggers": []} and state["precision"] == "fp16"
    assert integration._joined(mine, (other,))("fp16").__reduce__()[1] == (mine,)
