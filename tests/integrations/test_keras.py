"""Keras 3 on torch: `fit` of a compiled model in a precision of lowp."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import lowp

pytestmark = [
    pytest.mark.skipif(not importlib.util.find_spec("keras"), reason="pip install 'lowp[keras]'"),
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy"),  # what NumPy says of Keras
]


@pytest.fixture(autouse=True)
def keras_computes_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", "torch")


def data() -> tuple[Any, Any]:
    x = torch.randn(128, 10, generator=torch.Generator().manual_seed(0))
    return x.numpy(), x[:, :3].argmax(1).numpy()


def network(optimizer: str | None = "adam", **options: Any) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    layers = keras.layers
    model = keras.Sequential([layers.Dense(32, activation="relu"), layers.Dropout(0.1), layers.Dense(3)])
    if optimizer is not None:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.get({"class_name": optimizer, "config": options}), loss=loss)
    return model


def fit(precision: Any, **options: Any) -> tuple[list[float], Any, Any]:
    from lowp.integrations.keras import serve

    model = network(**options)
    used = None if precision is None else serve(model, precision)
    return model.fit(*data(), epochs=2, batch_size=32, verbose=0).history["loss"], used, model


def test_fp32_is_keras_itself() -> None:
    assert fit("fp32")[0] == fit(None)[0]


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp8", "e5m7", "dfp16"])
def test_a_model_trains_in_a_precision_and_its_results_are_fp32(name: str) -> None:
    losses, used, model = fit(name)
    assert losses == pytest.approx(fit(None)[0], rel=2e-2) and used.report().ops
    assert used.steps == 8 and used.skipped_steps == 0
    assert model.predict(data()[0][:2], verbose=0).dtype == "float32"
    assert model.evaluate(*data(), verbose=0) < losses[0]


def test_gradients_are_clipped_without_the_loss_scale_and_an_overflow_skips_the_step() -> None:
    losses, used, _ = fit("fp16", optimizer="sgd", learning_rate=0.1, clipnorm=0.1)
    assert losses == pytest.approx(fit(None, optimizer="sgd", learning_rate=0.1, clipnorm=0.1)[0], rel=1e-3)
    used = fit(lowp.Precision("fp16", loss_scale="dynamic(1e12)"))[1]
    assert used.skipped_steps == 8 and used.scale == pytest.approx(1e12 / 2**8)


def test_a_served_model_is_saved_as_keras_saves_it(tmp_path: Path) -> None:
    import keras

    _, _, model = fit("bf16")
    model.save(tmp_path / "model.keras")
    again = keras.models.load_model(tmp_path / "model.keras")
    assert all((one == other).all() for one, other in zip(model.get_weights(), again.get_weights(), strict=True))


def test_what_cannot_be_served_is_refused_in_words() -> None:
    from lowp.integrations.keras import serve

    with pytest.raises(lowp.InvalidInput, match=r"stores parameters in bf16, and optimizers of Keras know neither"):
        serve(network(), "bf16-storage")
    with pytest.raises(lowp.InvalidInput, match=r"flex16\+5 runs under lowp run --precision flex16\+5"):
        serve(network(), "flex16+5")
    with pytest.raises(lowp.InvalidInput, match=r"the model is not compiled: call model\.compile"):
        serve(network(None), "bf16")
    with pytest.raises(lowp.InvalidInput, match="Keras's own mixed precision comes beside the lowp precision fp16"):
        serve(network(loss_scale_factor=8.0), "fp16")
