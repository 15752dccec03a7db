from numpy import ndarray as Array

from mojolearn import lowbit as lowbit
from mojolearn import training as training
from mojolearn._numerics import get_num_threads as get_num_threads
from mojolearn._numerics import get_numeric_mode as get_numeric_mode
from mojolearn._numerics import numeric_mode as numeric_mode
from mojolearn._numerics import set_num_threads as set_num_threads
from mojolearn._numerics import set_numeric_mode as set_numeric_mode
from mojolearn._numerics import show_config as show_config
from mojolearn.blocks import Mamba3Block as Mamba3Block
from mojolearn.blocks import Mamba3State as Mamba3State
from mojolearn.blocks import TransformerBlock as TransformerBlock
from mojolearn.blocks import TransformerState as TransformerState
from mojolearn.config import SambaConfig as SambaConfig
from mojolearn.errors import CapacityError as CapacityError
from mojolearn.errors import CheckpointError as CheckpointError
from mojolearn.errors import NonFiniteError as NonFiniteError
from mojolearn.errors import RandomStreamError as RandomStreamError
from mojolearn.generation import generate as generate
from mojolearn.inference import SambaInference as SambaInference
from mojolearn.model import SambaState as SambaState
from mojolearn.stack import SambaStack as SambaStack

__version__: str

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
