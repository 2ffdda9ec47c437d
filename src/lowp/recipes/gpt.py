"""A small GPT on bytes, of a text such as tiny Shakespeare or of Python's own documentation.

The products of linear layers and attention run in low precision; layer normalisation and softmax read and write 16
bits and compute in fp32; the cross-entropy is fp32. Gradients are unscaled before they are clipped.

The network is a transformer that predicts the next byte: Radford et al., "Language Models are Unsupervised Multitask
Learners", 2019: normalisation before attention and MLP, learned positions, output weights shared with the embedding.
"""

import codecs
import importlib
import importlib.util
import io
import math
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from lowp.errors import InvalidInput
from lowp.inference.cache import KeyValueCache
from lowp.recipes.classification import score_metrics
from lowp.recipes.data.files import Published, read_bytes
from lowp.recipes.recipe import Data, Metric, Recipe, Size, adamw_where, built, one_cycle, tokens_of

# -- the network -------------------------------------------------------------------------------------------------------
BYTES = 256


class GPT(nn.Module):
    """A GPT on bytes: from int64 [N, T], T up to `length`, to scores of each next byte [N, T, 256]."""

    def __init__(self, layers: int, heads: int, width: int, length: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, width)
        self.position = nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.length = length
        self.blocks = nn.ModuleList(Block(heads, width, dropout) for _ in range(layers))
        self.normalise = nn.LayerNorm(width)
        initialise(self, layers)

    def forward(self, text: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return the scores of the next byte at each position, [N, T, 256]; with a cache, `text` goes on from there."""
        first = 0 if cache is None else cache.positions
        x = self.drop(self.embed(text) + self.position(torch.arange(first, first + text.shape[1], device=text.device)))
        for layer, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, partial(cache.attend, layer))
        if cache is not None:
            cache.advance(text.shape[1])
        return nn.functional.linear(self.normalise(x), self.embed.weight)


def initialise(network: nn.Module, layers: int) -> None:
    """Draw matrices with a standard deviation of 0.02; of residual branches, the smaller the more layers there are."""
    for name, parameter in network.named_parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if ".add" in name else 0.02)


class Block(nn.Module):
    """A transformer block: attention and an MLP of four times the width, both with residual connections.

    `is_causal`: a position attends to those before it and to itself. `forward` may be given another attention.
    """

    def __init__(self, heads: int, width: int, dropout: float, is_causal: bool = True) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        self.before_attention, self.before_perceptron = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.add_attention = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.add_perceptron = nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, attend: Callable[..., Tensor] | None = None) -> Tensor:
        x = x + self.drop(self.add_attention(self._attend(self.before_attention(x), attend)))
        wide = nn.functional.gelu(self.widen(self.before_perceptron(x)))
        output: Tensor = x + self.drop(self.add_perceptron(wide))
        return output

    def _attend(self, x: Tensor, attend: Callable[..., Tensor] | None) -> Tensor:
        count, length, width = x.shape
        parts = self.query_key_value(x).view(count, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind()
        if attend is None:
            attended = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        else:
            attended = attend(query, key, value)
        return attended.transpose(1, 2).reshape(count, length, width)


# -- data --------------------------------------------------------------------------------------------------------------
TEXT = Published(
    "a text file",
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt (tiny Shakespeare), or "
    "take any text",
)
# File names of a set with separate training and validation files (WikiText), and of a single text.
_DIVIDED = (("*train*.txt", "*train.tokens"), ("*valid*.txt", "*valid.tokens", "*test*.txt"))
_UNDIVIDED = ("input.txt", "*.txt")
_HELD_SHARE = 0.1
_MODULES = "argparse datetime decimal doctest logging pathlib random statistics typing unittest".split()


class Passages:
    """Passages of a text as batches ``(bytes int64 [N, length], the byte after each int64 [N, length])``.

    Passage i begins at i * length; with a generator, at a random position less than `length` bytes later.
    """

    def __init__(self, text: Tensor, length: int) -> None:
        self.text, self.length = text, length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def batch(self, indices: Tensor, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """Return the passages at `indices`."""
        starts = indices * self.length
        if generator is not None:
            starts = starts + torch.randint(self.length, starts.shape, generator=generator)
        starts = starts.clamp(max=len(self.text) - 1 - self.length)
        positions = starts[:, None] + torch.arange(self.length)
        return self.text[positions].long(), self.text[positions + 1].long()


def read_passages(path: Path, length: int) -> Data:
    """Read a text, whose last tenth is for validation, or a folder with training and validation files.

    Raises InvalidInput if there is no text, or if it is too short for a passage of `length` bytes.
    """
    parts = [TEXT.find_or_none(path, names) for names in _DIVIDED]
    if parts[0] is not None and parts[1] is not None and path.is_dir():
        training, held = (read_bytes(TEXT, part) for part in parts if part is not None)
        return text_data(training, held, length, f"{parts[0].name} and {parts[1].name} from {path}")
    file = path if path.is_file() else TEXT.find(path, _UNDIVIDED)
    content = read_bytes(TEXT, file)
    if len(content) * _HELD_SHARE < length + 2:
        raise TEXT.broken(file, f"has {len(content):,} bytes, and {round((length + 2) / _HELD_SHARE):,} are needed")
    cut = round(len(content) * (1 - _HELD_SHARE))
    return text_data(content[:cut], content[cut:], length, str(file))


def text_data(training: bytes, held: bytes, length: int, source: str) -> Data:
    """Return a training and a validation text as passages of `length` bytes."""
    parts = [Passages(torch.frombuffer(bytearray(text), dtype=torch.uint8), length) for text in (training, held)]
    return Data(parts[0], parts[1], f"{source}: {len(training):,} bytes to train on, {len(held):,} held back")


def pythons_text(max_bytes: int) -> tuple[bytes, bytes, str]:
    """Return training text, validation text, at most `max_bytes` bytes together, and their description.

    They are the Zen of Python, the docstrings of some modules, and the reference shown by help(): English with
    examples. They differ between versions of Python.
    """
    with redirect_stdout(io.StringIO()):
        zen = codecs.decode(importlib.import_module("this").s, "rot13")
    texts = [zen, *(importlib.import_module(name).__doc__ or "" for name in _MODULES)]
    if importlib.util.find_spec("pydoc_data.topics") is not None:
        topics = importlib.import_module("pydoc_data.topics").topics
        texts += [topics[name] for name in sorted(topics)]
    content = "\n\n".join(texts).encode("ascii", "replace")[:max_bytes]
    cut = round(len(content) * (1 - _HELD_SHARE))
    return content[:cut], content[cut:], "Python's own documentation"


def generate(model: nn.Module, text: Tensor, count: int, cache: str = "fp32") -> Tensor:
    """Return `text` [N, T] and `count` bytes more, each the likeliest; keys and values are kept in the format `cache`.

    `model` is a GPT, as trained or as `quantize_model` serves it. Raises InvalidInput if they exceed its length.
    """
    kept, needed = KeyValueCache(cast(int, model.length), cache), text.shape[1] + max(count - 1, 0)
    if needed > kept.length:  # the last byte is not read
        raise InvalidInput(f"{needed} positions do not fit a model of {kept.length}: generate less")
    with torch.no_grad():
        scores = model(text, kept)
        for i in range(count):
            text = torch.cat([text, scores[:, -1:].argmax(-1)], 1)
            scores = model(text[:, -1:], kept) if i + 1 < count else scores
    return text


# -- the recipe --------------------------------------------------------------------------------------------------------
def load(size: Size, path: Path | None) -> Data:
    """Return passages of the user's text, or of Python's documentation, of the network's length."""
    length = size.options["length"]
    if path is not None:
        return read_passages(path, length)
    training, held, source = pythons_text(size.options["bytes"])
    return text_data(training, held, length, source)


def loss(model: nn.Module, batch: Any) -> Tensor:
    """Compute the cross-entropy of the next byte, averaged over all positions."""
    text, following = batch
    return nn.functional.cross_entropy(model(text).flatten(0, 1), following.flatten())


def evaluate(model: nn.Module, batches: Iterable[Any]) -> dict[str, float]:
    """Return ``bits_per_byte``, ``accuracy`` (the share of correct bytes) and ``loss``, the cross-entropy."""
    metrics = score_metrics((model(text).flatten(0, 1), following.flatten()) for text, following in batches)
    return {"bits_per_byte": metrics["loss"] / math.log(2), **metrics}


def decays(name: str, parameter: nn.Parameter) -> bool:
    """Return whether weight decay applies: to matrices, not to biases and normalisations."""
    return parameter.dim() > 1


_SMALL = {"layers": 3, "heads": 4, "width": 96, "length": 64, "dropout": 0.0, "bytes": 300_000}
_FULL = {"layers": 6, "heads": 6, "width": 384, "length": 256, "dropout": 0.2, "bytes": 10_000_000}

GPT_RECIPE = Recipe(
    name="gpt",
    summary="small GPT: predicts the next byte of a text",
    source="Radford et al. 2019, Language Models are Unsupervised Multitask Learners; size of nanoGPT's Shakespeare",
    data="embedded: the documentation in Python's own library; --data DIR or FILE: a text (tiny Shakespeare, WikiText)",
    sizes={"cpu": Size(4, 32, 3e-3, 366_432, _SMALL), "full": Size(20, 64, 1e-3, 10_844_160, _FULL)},
    metric=Metric("bits_per_byte", higher_is_better=False, share=False),
    load=load,
    make_model=built(GPT, "layers", "heads", "width", "length", "dropout"),
    loss=loss,
    evaluate=evaluate,
    make_optimizer=partial(adamw_where, decays, weight_decay=0.1, betas=(0.9, 0.95)),
    schedule=one_cycle,
    clip=1.0,
    unit="tokens",
    units=tokens_of,
)
