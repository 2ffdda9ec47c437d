"""Serve the GPT recipe in few bits: loss, bytes and tokens a second, beside torchao's and onnxruntime's 4 bits.

Run: `python bench/serving.py [--quick] [--epochs N | --checkpoint FILE] [--json FILE]`. A GPT of the recipe's size for
a CPU is trained in fp32 (or read from a file of weights) and served: `excess` is what a format adds to the validation
loss, `KL` how far its probabilities are from those in fp32. Tokens a second are those of the published size with random
weights, one text, likeliest bytes, on one thread: the step of one byte alone (`layers`), and whole texts with keys and
values in fp32, int8 and fp8; and that of a step after contexts of up to 16,384 bytes. All take turns, and the best
round counts. torchao's IntxWeightOnlyConfig has no kernel for int4 on a CPU: it multiplies the values. Libraries that
are not installed are omitted, and the table says so.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import json
import logging
import math
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from inference import best
from torch import Tensor, nn

import lowp
from lowp.inference import KeyValueCache
from lowp.recipes import results
from lowp.recipes.gpt import GPT, GPT_RECIPE, generate
from lowp.recipes.training import Settings, Training

FORMATS = ("int8", "e4m3fn", "mxfp8", "i3s@fp32/32", "int4", "nvfp4", "mxfp4")
CACHES = ("fp32", "bf16", "int8", "e4m3fn@fp32/row")
CONTEXTS = (256, 1024, 4096, 16384)
GROUP = 32  # weights under a scale, of the others


def torchao_int4(model: nn.Module) -> nn.Module:
    """Return torchao's int4 with a scale for each group."""
    quantization: Any = importlib.import_module("torchao.quantization")
    config = quantization.IntxWeightOnlyConfig(torch.int4, quantization.PerGroup(GROUP))
    model = copy.deepcopy(model).eval()
    quantization.quantize_(model, config)
    return model


class OnnxRuntime(nn.Module):
    """onnxruntime's MatMulNBits in 4 bits."""

    def __init__(self, model: nn.Module, text: Tensor) -> None:
        super().__init__()
        onnx, runtime = importlib.import_module("onnx"), importlib.import_module("onnxruntime")
        quantizer: Any = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
        for name in (quantizer.__name__, "onnx_ir", "onnxscript"):
            logging.getLogger(name).setLevel(logging.WARNING)  # they tell of every node
        length = torch.export.Dim.DYNAMIC
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path = Path(folder) / "model.onnx"
            program = torch.onnx.export(
                model.eval(), (text,), dynamo=True, verbose=False, dynamic_shapes=({0: length, 1: length},)
            )
            assert program is not None
            program.save(str(path), external_data=False)
            made = quantizer.MatMulNBitsQuantizer(onnx.load(path), bits=4, block_size=GROUP, is_symmetric=True)
            made.process()
            written = made.model.model.SerializeToString()
        options: Any = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.bytes = len(written)
        self.session = runtime.InferenceSession(written, options, providers=["CPUExecutionProvider"])
        self.name = self.session.get_inputs()[0].name

    def forward(self, text: Tensor) -> Tensor:
        """The scores."""
        return torch.from_numpy(self.session.run(None, {self.name: text.numpy()})[0])


def size_of(model: nn.Module) -> int:
    """Bytes of what a model holds."""
    if isinstance(model, OnnxRuntime):
        return model.bytes
    held = 0
    for one in (*model.parameters(), *model.buffers()):
        inner = [getattr(one, name) for name in getattr(one, "tensor_data_names", ())] or [one]
        held += sum(part.numel() * part.element_size() for part in inner)
    return held


def trained(epochs: int, checkpoint: Path | None, quick: bool) -> Training:
    """Return a training of the recipe that is done, or has the weights of a file."""
    run = Training(Settings(recipe="gpt", precision="fp32", epochs=epochs).filled())
    if checkpoint is not None:
        run.model.load_state_dict(lowp.load(checkpoint, dtype=torch.float32))
    elif not quick:
        run.run(lambda _: None, lambda: False)
    run.model.eval()
    return run


def contenders(
    run: Training, model: nn.Module, formats: tuple[str, ...]
) -> Iterator[tuple[str, Callable[[], nn.Module]]]:
    """Yield ways to serve a model, calibrated on some batches of the training set."""
    examples = run.data.training
    batches = [examples.batch(some)[0] for some in torch.arange(min(len(examples), 512)).split(64)]
    yield "fp32", lambda: model
    for format in formats:
        for rounding in ("nearest", "gptq"):
            name = f"lowp {format}{', gptq' if rounding == 'gptq' else ''}"
            yield name, lambda f=format, r=rounding: lowp.quantize_model(model, f, batches, rounding=r)  # type: ignore[misc]
    yield "torchao int4", lambda: torchao_int4(model)
    yield "onnxruntime 4 bits", lambda: OnnxRuntime(model, batches[0])


def measured(run: Training, formats: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Yield a row for each contender: loss, excess and bytes, or the error's text."""
    base, of_nearest = math.nan, math.nan
    for name, make in contenders(run, run.model, formats):
        try:
            model = make()
            loss, divergence = _divergence(run, model)
        except Exception as error:
            yield {"served": name, "failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
            continue
        base = loss if name == "fp32" else base
        row = {"served": name, "loss": loss, "perplexity": math.exp(loss), "excess": loss - base, "kl": divergence}
        if name.endswith(", gptq"):
            row["of nearest"] = (loss - base) / of_nearest
        else:
            of_nearest = loss - base
        yield {**row, "bytes": size_of(model)}


def _divergence(run: Training, model: nn.Module) -> tuple[float, float]:
    """The validation loss of a model, and the mean KL divergence of its probabilities from those of the trained one."""
    loss = divergence = 0.0
    count = 0
    with torch.no_grad():
        for text, following in run.validation_batches():
            wanted, found = (one(text).log_softmax(-1).double() for one in (run.model, model))
            loss -= float(found.gather(-1, following[..., None]).sum())
            divergence += float((wanted.exp() * (wanted - found)).sum())
            count += following.numel()
    return loss / count, divergence / count


def of_caches(run: Training) -> Iterator[dict[str, Any]]:
    """Yield a row for each format of keys and values: the mean difference of the next byte's log-probability, bytes."""
    text, following = next(iter(run.validation_batches()))
    with torch.no_grad():
        wanted = run.model(text).log_softmax(-1).gather(2, following[..., None])
        for format in CACHES:
            cache = KeyValueCache(text.shape[1], format)
            parts = [run.model(one, cache) for one in text.split(8, 1)]
            found = torch.cat(parts, 1).log_softmax(-1).gather(2, following[..., None])
            yield {"cache": format, "difference": float((found - wanted).abs().mean()), "bytes": cache.nbytes}


def long_texts(size: str, contexts: tuple[int, ...], rounds: int) -> Iterator[dict[str, Any]]:
    """Yield tokens a second of the next byte after contexts, by the format of keys and values, and their bytes."""
    torch.manual_seed(0)
    options = {**GPT_RECIPE.size(size).options, "dropout": 0.0, "length": max(contexts) + 1}
    layers, heads, width = (options[name] for name in ("layers", "heads", "width"))
    model = GPT(layers, heads, width, options["length"], 0.0).eval()
    for context in contexts:
        caches = {format: KeyValueCache(context + 1, format) for format in CACHES}
        for layer in range(layers):
            key, value = (torch.randn(1, heads, context, width // heads) for _ in range(2))
            for cache in caches.values():
                cache.keep(layer, key, value)
        steps: dict[str, Callable[[Tensor], Tensor]] = {}
        for format, cache in caches.items():

            def step(x: Tensor, cache: KeyValueCache = cache, context: int = context) -> Tensor:
                cache.positions = context
                found: Tensor = model(x, cache)
                return found

            steps[format] = step
        times = best(dict(steps), torch.zeros(1, 1, dtype=torch.int64), rounds)
        for format, seconds in times.items():
            yield {"context": context, "cache": format, "tokens": 1 / seconds, "bytes": caches[format].nbytes}


def speeds(run: Training, formats: tuple[str, ...], rounds: int, count: int, size: str) -> Iterator[dict[str, Any]]:
    """Yield tokens a second of the published size: of the layers alone, and of a generated text."""
    torch.manual_seed(0)
    model = GPT_RECIPE.make_model(GPT_RECIPE.size(size)).eval()
    models: dict[str, nn.Module] = {}
    for name, make in contenders(run, model, formats):
        if "gptq" in name:
            continue  # as fast as nearest
        try:
            models[name] = make()
        except Exception as error:
            yield {"served": name, "failure": f"{type(error).__name__}: {str(error).splitlines()[0]}"}
    token = torch.zeros(1, 1, dtype=torch.int64)
    times = best(dict(models), token, rounds)
    texts = {
        (name, cache): (lambda x, m=one, c=cache: generate(m, x, count, c))
        for name, one in models.items()
        for cache in CACHES
        if not isinstance(one, OnnxRuntime)
    }
    whole = best(texts, token, 3)  # type: ignore[arg-type]
    for name, one in models.items():
        row = {"served": name, "layers": 1 / times[name], "bytes": size_of(one)}
        row["texts"] = {cache: count / seconds for (of, cache), seconds in whole.items() if of == name}  # type: ignore[misc]
        yield row


def told(row: dict[str, Any]) -> str:
    """A row of any of the tables as a line."""
    if "failure" in row:
        return f"{row['served']:20} {row['failure']}"
    size = f"{row['bytes']:,} bytes"
    if "difference" in row:
        return f"cache {row['cache']:16} |log p| differs by {row['difference']:.5f}   {size}"
    if "context" in row:
        return f"after {row['context']:6,}  {row['cache']:16} {row['tokens']:7.0f} tokens/s   {size}"
    if "layers" in row:
        texts = "  ".join(f"{cache} {speed:.0f}" for cache, speed in row["texts"].items())
        return f"{row['served']:20} {row['layers']:8.0f} tokens/s   texts: {texts}   {size}"
    share = f"   {row['of nearest']:.2f} of nearest's excess" if "of nearest" in row else ""
    loss = f"perplexity {row['perplexity']:.4f}   excess {row['excess']:+.5f}   KL {row['kl']:.6f}"
    return f"{row['served']:20} {loss}   {size}{share}"


def main() -> None:
    """Print four tables, and optionally write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="weights of the recipe's size for a CPU")
    parser.add_argument("--quick", action="store_true", help="untrained, and small")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    quick = arguments.quick
    formats, size, contexts = (FORMATS[-3:], "cpu", (64,)) if quick else (FORMATS, "full", CONTEXTS)
    run = trained(arguments.epochs, arguments.checkpoint, quick)
    tables = {
        "loss": measured(run, formats),
        "caches": of_caches(run),
        "contexts": long_texts(size, contexts, 3 if quick else 20),
        "speed": speeds(run, formats, *((3, 4) if quick else (40, 200)), size),
    }
    document: dict[str, Any] = {**results.header("bench-serving", "bench/serving.py"), **{name: [] for name in tables}}
    with torch.no_grad():
        for name, rows in tables.items():
            for row in rows:
                document[name].append(row)
                print(told(row), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
