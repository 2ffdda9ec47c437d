"""lowp: low-precision training of neural networks. The public names, loaded when first used (PEP 562)."""

from importlib import import_module

__version__ = "0.1.0"

# Public name -> "module:attribute", or "module" where the name is the module itself. Types are in __init__.pyi;
# tests/test_imports.py holds the two together.
_PUBLIC = {
    "Cast": "lowp.casts:Cast",
    "FORMATS": "lowp.formats:FORMATS",
    "GradScaler": "lowp.step:GradScaler",
    "GradientCompression": "lowp.compression:GradientCompression",
    "InvalidCheckpoint": "lowp.checkpoint:InvalidCheckpoint",
    "InvalidInput": "lowp.errors:InvalidInput",
    "LowpError": "lowp.errors:LowpError",
    "MasterWeights": "lowp.optim:MasterWeights",
    "Misuse": "lowp.errors:Misuse",
    "Monitor": "lowp.monitoring:Monitor",
    "NonFiniteGradients": "lowp.step:NonFiniteGradients",
    "NotWritten": "lowp.errors:NotWritten",
    "Observation": "lowp.ops.observing:Observation",
    "Policy": "lowp.policy:Policy",
    "Precision": "lowp.precision:Precision",
    "Quantized": "lowp.quantized:Quantized",
    "Rule": "lowp.policy:Rule",
    "Statistics": "lowp.kernels:Statistics",
    "Unavailable": "lowp.errors:Unavailable",
    "UnknownName": "lowp.errors:UnknownName",
    "autocast": "lowp.region:autocast",
    "decode": "lowp.kernels:decode",
    "dequantize": "lowp.kernels:dequantize",
    "encode": "lowp.kernels:encode",
    "format": "lowp.formats:parse",
    "inference": "lowp.inference",
    "load": "lowp.portable:load",
    "mismatch": "lowp.inference:mismatch",
    "observe": "lowp.ops.observing:observe",
    "optim": "lowp.optim",
    "profile": "lowp.profiling:profile",
    "quantize": "lowp.kernels:quantize",
    "quantize_model": "lowp.inference:quantize_model",
    "reproducible": "lowp.reproducing:reproducible",
    "save": "lowp.checkpoint:save",
    "statistics": "lowp.kernels:statistics",
}

__all__ = sorted(["__version__", *_PUBLIC])


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        from lowp.errors import unknown

        raise AttributeError(unknown("name in lowp", name, __all__), name=name, obj=None)
    module, _, attribute = _PUBLIC[name].partition(":")
    loaded = import_module(module)
    value: object = getattr(loaded, attribute) if attribute else loaded
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return list(__all__)
