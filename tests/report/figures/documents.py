"""Documents like those of the recorders, with numbers that are easy to recognize in a sentence."""

from __future__ import annotations

from typing import Any


def histogram(lowest: int = -30, counts: tuple[int, ...] = (1, 3, 9, 27, 9, 1), zeros: int = 50) -> dict[str, Any]:
    elements = sum(counts) + zeros
    named = {"lowest": lowest, "counts": list(counts), "elements": elements, "zeros": zeros, "nonfinite": 0}
    return {**named, "largest": 2.0 ** (lowest + len(counts)), "median": lowest + 3.5 if counts else None}


def in_fp16(below: float = 0.25, **named: Any) -> dict[str, Any]:
    return {"histogram": histogram(**named), "below": below, "zero": 0.125, "subnormal": 0.5, "infinite": 0.0}


def run(**named: Any) -> dict[str, Any]:
    metric = {"name": "accuracy", "is_share": True, "value": 0.875}
    common = {"recipe": "toy", "precision": "fp32", "seed": 0, "epochs": 4, "steps": 40, "metric": metric}
    return {**common, "failure": None, "steps_sampled": [1], **named}


def updates() -> dict[str, Any]:
    def moment(epoch: int) -> dict[str, Any]:
        shares = {"below": {"bf16": 0.4, "fp16": 0.05}, "lost": {"bf16": 0.3, "fp16": 0.04}}
        return {"epoch": epoch, "learning_rates": [0.1, 0.1], "gradients": histogram(), "ratios": histogram(), **shares}

    moments = {"first": moment(1), "middle": moment(2), "last": moment(4)}
    return run(limits={"bf16": -8, "fp16": -11}, moments=moments)


def gradients() -> dict[str, Any]:
    parts = {"gradients": in_fp16(0.0005), "updates": in_fp16(0.19), "ratios": histogram()}
    shares = {"flushed": 0.0003, "unmoved": 0.92, "below": {"bf16": 0.99, "fp16": 0.95}}
    return run(limits={"bf16": -8, "fp16": -11}, **parts, **shares)


def activation_gradients() -> dict[str, Any]:
    layers = [
        {"name": "0", "activations": -12.0, "weights": -9.0},
        {"name": "2", "activations": -11.0, "weights": -9.5},
    ]
    return run(activations=in_fp16(), weights=in_fp16(0.01, lowest=-27), layers=layers)


def loss_scaling(scales: tuple[float, ...] = (256.0, 256.0)) -> dict[str, Any]:
    found = {"before": in_fp16(0.25), "after": in_fp16(0.001, lowest=-22)}
    return run(
        scales=[[4 * place, scale] for place, scale in enumerate(scales)],
        last_scale=scales[-1],
        skipped_steps=1,
        room=3,
        **found,
    )


def stall() -> dict[str, Any]:
    def variant(label: str, moving: float, never: float) -> dict[str, Any]:
        history = [{"epoch": epoch, "loss": 2.0 - epoch * moving, "accuracy": 0.3 + 0.1 * epoch} for epoch in range(3)]
        steps = list(range(20))
        row = {"label": label, "step": steps, "moving": [moving] * 20, "never": never}
        return {**row, "history": history, "failure": None}

    rows = [variant("fp32", 1.0, 0.0), variant("masters", 0.9, 0.0), variant("stochastic", 0.03, 0.3)]
    rows.append(variant("to nearest", 0.01, 0.98))
    ways = [[0.1 + place * step for step in range(21)] for place in range(4)]
    return run(way_steps=list(range(21)), format="bf16", parameter="0.weight", index=[3, 1], ways=ways, variants=rows)


def curves(**last: float) -> dict[str, Any]:
    def row(label: str, start: float) -> dict[str, Any]:
        runs = []
        for seed in range(2):
            history = [{"epoch": 0, "accuracy": 0.1, "loss": 2.3, **last}]
            for epoch in (1, 2, 3):
                numbers = {"accuracy": start + 0.05 * epoch + 0.01 * seed, "loss": 1 / epoch}
                history.append({"epoch": epoch, **numbers, **last})
            runs.append({"history": history, "failure": None})
        return {"label": label, "runs": runs}

    recipe = {"name": "toy", "metric": "accuracy", "metric_is_share": True, "higher_is_better": True}
    return {"recipe": recipe, "seeds": [0, 1], "variants": [row("fp32", 0.8), row("fp16", 0.7)]}


def cost() -> dict[str, Any]:
    def row(name: str, value: float, how: str) -> dict[str, Any]:
        estimate = {"value": value, "unit": "pJ", "how": how}
        parts = {"energy": ("multiply", "add"), "read": ("SRAM of 8 KB", "DRAM"), "area": ("multiply", "add")}
        entries = {entry: dict.fromkeys(names, estimate) for entry, names in parts.items()}
        return {"name": name, "significand_bits": 8, "is_integer": False, **entries}

    return {"source": "a paper", "formats": [row("fp32", 4.0, "table"), row("bf16", 0.5, "interpolated")]}


def autoflex() -> dict[str, Any]:
    def one(site: str) -> dict[str, Any]:
        numbers = {"step": [0, 1, 2, 3], "mantissa": [9000, 12000, 20000, 15000], "exponent": [-16, -16, -15, -15]}
        return {"site": site, **numbers, "predicted": [None, 0.2, 0.4, 0.5]}

    series = {name: one(f"a {name}") for name in ("weights", "activations", "updates")}
    return {"recipe": "toy", "precision": "flex16+5", "steps": 4, "series": series}


def flex_window() -> dict[str, Any]:
    def histogram(below: float) -> dict[str, Any]:
        counts = {"elements": 99, "zeros": 0, "counts": [0] * 30 + [1, 5, 9, 5, 1] + [0] * 30}
        return {**counts, "below_maximum": below / 2, "below_unit": below, "exponents": [-20, -18]}

    windows = {
        name: {"site": f"a {name}", "first": histogram(0.03), "last": histogram(0.01)} for name in ("weights", "x")
    }
    return {"recipe": "toy", "precision": "flex16+5", "lowest": -48, "windows": windows}


def without_zeros() -> dict[str, Any]:
    found = gradients()
    found["updates"]["histogram"] = histogram(-40, (1, 2, 0, 4), zeros=0)
    return found


def one_layer() -> dict[str, Any]:
    both = {"activations": in_fp16(lowest=-20), "weights": in_fp16(0.01, lowest=-22)}
    return {**activation_gradients(), **both, "layers": [{"name": "0", "activations": -12.0, "weights": -9.0}]}


def grid(is_share: bool) -> dict[str, Any]:
    recipe = {"name": "toy", "metric": "accuracy" if is_share else "loss", "metric_is_share": is_share}
    values = [[0.125, 0.25, 0.5], [0.75, 0.5, None]]
    table = {"exponent_bits": [3, 4], "mantissa_bits": [1, 2, 3], "subnormals": is_share, "values": values}
    spreads = {f"effect_of_{name}": {"spread": spread} for name, spread in (("exponent", 0.1), ("mantissa", 0.2))}
    return {"recipe": {**recipe, "higher_is_better": is_share}, "grid": {**table, **spreads}}


def benchmark() -> dict[str, Any]:
    """Recipes with memory within what was reserved, beyond it, and not measured, with what was published."""

    def row(
        label: str, relative: float | None, parts: dict[str, int] | None = None, reserved: int = 0
    ) -> dict[str, Any]:
        step = {"relative": relative, "median": None if relative is None else relative / 100}
        if parts is None:
            return {"label": label, "step": step}
        allocated = sum(parts.values())
        slack = reserved - allocated if reserved else None
        memory = {"parts": parts, "allocated": allocated, "reserved": reserved or None, "slack": slack}
        return {"label": label, "step": step, "memory": memory}

    def subject(name: str, *rows: dict[str, Any], published: Any = None) -> dict[str, Any]:
        return {"recipe": {"name": name, "size": "cpu", "batch": 4}, "variants": rows, "published": published}

    parts = {"weights": 1000, "masters": 0, "gradients": 990, "activations": 2000, "other": 10}
    half = {"weights": 500, "masters": 1000, "gradients": 500, "activations": 1000, "other": 0}
    gpu = {"gpu": "T4", "time_ratio": 0.7, "memory_ratio": 0.63, "gigabytes": [4.26, 2.67]}
    both = [gpu, {**gpu, "gpu": "V100", "time_ratio": 0.95}]
    return {
        "recipes": [
            subject("one", row("fp32", 1.0, parts, 5000), row("lowp fp16", 0.3, half, 3000), published={"gpus": both}),
            subject(
                *("two", row("fp32", 1.0, parts), row("torch.amp bf16", 5.0, half), row("lowp bf16", 1.5, half, 2000)),
                row("lowp e4m3", None),
            ),
            subject("three", row("fp32", 1.0, {"weights": 1000}, 2000), row("lowp fp16", 0.75)),
            subject("four", row("fp32", 1.0)),
        ]
    }
