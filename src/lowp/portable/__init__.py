"""Conversion and reading of checkpoints: safetensors and torch files, packed or plain."""

from lowp.portable.converting import Converted, TensorReport, convert
from lowp.portable.sources import load

__all__ = ["Converted", "TensorReport", "convert", "load"]
