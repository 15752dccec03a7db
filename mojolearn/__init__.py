"""Samba language models on the CPU: Mamba-3 and attention layers, trained and served with reproducible bits."""

from mojolearn import _launch  # noqa: F401  # isort: skip (first: kernels that cannot run are refused here)

from numpy import ndarray as Array

from mojolearn import lowbit, training
from mojolearn._numerics import (
    get_num_threads,
    get_numeric_mode,
    numeric_mode,
    set_num_threads,
    set_numeric_mode,
    show_config,
)
from mojolearn.blocks import Mamba3Block, Mamba3State, TransformerBlock, TransformerState
from mojolearn.config import SambaConfig
from mojolearn.errors import CapacityError, CheckpointError, NonFiniteError, RandomStreamError
from mojolearn.generation import generate
from mojolearn.inference import SambaInference
from mojolearn.model import SambaState
from mojolearn.stack import SambaStack

__version__ = "0.1.0"

__all__ = [
    "Array",
    "CapacityError",
    "CheckpointError",
    "Mamba3Block",
    "Mamba3State",
    "NonFiniteError",
    "RandomStreamError",
    "SambaConfig",
    "SambaInference",
    "SambaStack",
    "SambaState",
    "TransformerBlock",
    "TransformerState",
    "generate",
    "get_num_threads",
    "get_numeric_mode",
    "lowbit",
    "numeric_mode",
    "set_num_threads",
    "set_numeric_mode",
    "show_config",
    "training",
]
