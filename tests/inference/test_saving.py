"""Files of served models: the same bits after they are opened again, and errors for other files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowp
from lowp import inference
from lowp.errors import InvalidInput

FORMATS = ("int8", "int4", "mxfp4", "nvfp4", "e2m1", "i3s@fp32/32", "mxfp8", "mxfp6", "e4m3fn", "e4m3fn@fp32/row")
FORMATS += ("bf16", "fp16", "ternary", "binary", "int8-affine")


class Network(nn.Module):
    """A layer of every kind that is served, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.attention = nn.MultiheadAttention(32, 2, batch_first=True)
        self.normalise = nn.LayerNorm(32)
        self.convolution = nn.Conv1d(32, 16, 3, padding=1)
        self.out = nn.Linear(16, 5)

    def forward(self, indices: Tensor) -> Tensor:
        """[N, T, 5]"""
        x = self.normalise(self.embed(indices))
        x = self.attention(x, x, x, need_weights=False)[0]
        found: Tensor = self.out(self.convolution(x.transpose(1, 2)).transpose(1, 2).relu())
        return found


def _network(seed: int) -> Network:
    torch.manual_seed(seed)
    return Network().eval()


@pytest.mark.parametrize("format", FORMATS)
def test_a_served_model_has_the_same_bits_when_it_is_opened_again(format: str, tmp_path: Path) -> None:
    indices, path = torch.arange(12).reshape(2, 6), tmp_path / "served.safetensors"
    served = lowp.quantize_model(_network(0), format, [indices], keep=["out"])
    inference.save(served, path)
    opened = inference.load(_network(1), path)
    assert torch.equal(opened(indices), served(indices))
    assert inference.unquantized(opened) == inference.unquantized(served) == {"out": "asked for (keep)"}
    state = lowp.load(path)
    assert set(state) == set(served.state_dict())
    assert path.stat().st_size < sum(one.nbytes for one in served.state_dict().values()) + 8192


def test_the_numbers_of_the_model_that_takes_a_file_do_not_count(tmp_path: Path) -> None:
    served, other, path = lowp.quantize_model(_network(0), "nvfp4"), _network(1), tmp_path / "served.safetensors"
    inference.save(served, path)
    for parameter in other.parameters():
        nn.init.constant_(parameter, torch.nan)  # as memory that nobody has set may be
    indices = torch.arange(12).reshape(2, 6)
    assert torch.equal(inference.load(other, path)(indices), served(indices))
    assert all(one.isnan().all() and one.requires_grad for one in other.parameters())


def test_ranges_of_activations_are_those_that_were_saved(tmp_path: Path) -> None:
    x, path = torch.randn(4, 8), tmp_path / "served.safetensors"
    for data in (None, [x]):
        served = lowp.quantize_model(nn.Sequential(nn.Linear(8, 8)), "int8", data)
        inference.save(served, path)
        opened = inference.load(nn.Sequential(nn.Linear(8, 8)), path)
        assert opened[0].weight.range() == served[0].weight.range()
        assert torch.equal(opened(3 * x), served(3 * x))
        assert ('"dynamic": true' in opened[0].text) == (data is None)


def test_other_files_and_other_models_are_refused_in_words(tmp_path: Path) -> None:
    path, other = tmp_path / "served.safetensors", tmp_path / "plain.safetensors"
    torch.save(nn.Linear(8, 8).state_dict(), tmp_path / "plain.pt")
    lowp.portable.convert(tmp_path / "plain.pt", other, "int8")
    with pytest.raises(
        InvalidInput, match=r"holds no served model: give a file of lowp\.inference\.save or lowp convert"
    ):
        inference.load(nn.Linear(8, 8), other)
    with pytest.raises(InvalidInput, match=r"Linear is not a model from lowp\.quantize_model, which is needed here"):
        inference.save(nn.Linear(8, 8), path)
    served = lowp.quantize_model(nn.Sequential(nn.Linear(8, 8)), "int8")
    with pytest.raises(InvalidInput, match=r"is no \.safetensors file, as which served models are saved"):
        inference.save(served, tmp_path / "served.pt")
    inference.save(served, path)
    models: dict[str, Any] = {
        "size mismatch": nn.Sequential(nn.Linear(80, 8)),
        "Missing key": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        "Unexpected key": nn.Sequential(nn.ReLU()),
    }
    for text, model in models.items():
        with pytest.raises(InvalidInput, match=rf"does not fit the model: (.|\n)*{text}"):
            inference.load(model, path)
