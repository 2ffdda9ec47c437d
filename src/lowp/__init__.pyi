from lowp import optim
from lowp.checkpoint import load, save
from lowp.formats import FORMATS
from lowp.formats import parse as format
from lowp.grad_scaler import GradScaler
from lowp.kernels import decode, dequantize, encode, quantize, statistics
from lowp.optim import MasterWeights
from lowp.policy import Policy, Rule
from lowp.precision import Precision
from lowp.region import autocast

__version__: str

__all__ = [
    "FORMATS",
    "GradScaler",
    "MasterWeights",
    "Policy",
    "Precision",
    "Rule",
    "__version__",
    "autocast",
    "decode",
    "dequantize",
    "encode",
    "format",
    "load",
    "optim",
    "quantize",
    "save",
    "statistics",
]
