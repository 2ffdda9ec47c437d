"""fastai: a Learner in a precision of lowp, with the callbacks that clip and accumulate gradients."""

from __future__ import annotations

import importlib.util
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lowp

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("fastai"), reason="pip install 'lowp[fastai]'"),
    pytest.mark.filterwarnings("ignore"),  # those of fastai and of what it imports
]


def fit(precision: Any, *callbacks: Any, model: nn.Module | None = None, **options: Any) -> tuple[list[float], Any]:
    """Return the numbers of the last epoch, and the precision."""
    from fastai.basics import CrossEntropyLossFlat, DataLoader, DataLoaders, Learner, accuracy, set_seed

    from lowp.integrations.fastai import LowpMixedPrecision

    set_seed(0)
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x[:, :3].argmax(1))
    loaders = DataLoaders(DataLoader(data, bs=32, shuffle=True), DataLoader(data, bs=64), device="cpu")
    layers = nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 3)
    own = [] if precision is None else [LowpMixedPrecision(precision)]
    options = {"loss_func": CrossEntropyLossFlat(), "metrics": accuracy, "cbs": [*callbacks, *own], **options}
    learn = Learner(loaders, model or nn.Sequential(*layers), **options)
    with learn.no_bar(), learn.no_logging():
        learn.fit(2, 1e-2)
    return list(map(float, learn.recorder.values[-1])), own[0].lowp if own else None


def test_fp32_is_fastai_itself() -> None:
    assert fit("fp32")[0] == fit(None)[0]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "e5m7", "dfp16"])
def test_a_learner_trains_in_a_precision(name: str) -> None:
    numbers, used = fit(name)
    assert numbers[:2] == pytest.approx(fit(None)[0][:2], abs=2e-2)  # the losses
    assert used.steps == 8 and used.skipped_steps == 0 and used.report().ops


def test_gradients_are_clipped_and_accumulated_without_the_loss_scale() -> None:
    from fastai.callback.all import GradientAccumulation, GradientClip

    for callbacks in ([GradientClip(0.1)], [GradientAccumulation(64)], [GradientAccumulation(64), GradientClip(0.1)]):
        numbers, used = fit("fp16", *callbacks)
        assert numbers == pytest.approx(fit(None, *callbacks)[0], abs=5e-3)
        assert used.steps == (8 if len(callbacks) == 1 and isinstance(callbacks[0], GradientClip) else 4)


def test_an_optimizer_of_torch_s_is_served_and_an_overflow_skips_the_step() -> None:
    from fastai.optimizer import OptimWrapper

    assert fit("fp16", opt_func=partial(OptimWrapper, opt=torch.optim.AdamW))[1].steps == 8
    used = fit(lowp.Precision("fp16", loss_scale="dynamic(1e12)"))[1]
    assert used.skipped_steps == 8 and used.scale == pytest.approx(1e12 / 2**8)


def test_what_cannot_be_served_is_refused_in_words() -> None:
    from fastai.callback.fp16 import MixedPrecision

    with pytest.raises(lowp.InvalidInput, match=r"stores parameters in bf16, and optimizers of fastai know neither"):
        fit("bf16-storage")
    with pytest.raises(lowp.InvalidInput, match=r"MixedPrecision comes beside the lowp precision fp16: omit to_fp16"):
        fit("fp16", MixedPrecision())


def test_a_model_that_fails_leaves_no_region_behind() -> None:
    class Failing(nn.Linear):
        def forward(self, x: Any) -> Any:
            raise RuntimeError("of the model")

    with pytest.raises(RuntimeError, match="of the model"):
        fit("bf16", model=Failing(10, 3))
    assert not torch.is_autocast_enabled("cpu")
