"""Models as they are served: weights in few bits, products on packed operands, calibration, export to ONNX."""

from lowp.inference import operators as operators  # registers them with torch
from lowp.inference.attention import attention
from lowp.inference.cache import KeyValueCache
from lowp.inference.calibration import METHODS
from lowp.inference.exporting import export_onnx
from lowp.inference.measuring import Footprint, footprint
from lowp.inference.mismatch import ServingMismatch, mismatch
from lowp.inference.quantizing import quantize_model, training_policy, unquantized
from lowp.inference.saving import load, save

__all__ = ["METHODS", "Footprint", "KeyValueCache", "ServingMismatch", "attention", "export_onnx", "footprint"]
__all__ += ["load", "mismatch", "quantize_model", "save", "training_policy", "unquantized"]
