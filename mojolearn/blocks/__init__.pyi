from mojolearn.blocks.mamba3 import Mamba3Block as Mamba3Block
from mojolearn.blocks.mamba3 import Mamba3State as Mamba3State
from mojolearn.blocks.transformer import TransformerBlock as TransformerBlock
from mojolearn.blocks.transformer import TransformerState as TransformerState

__all__ = ["Mamba3Block", "Mamba3State", "TransformerBlock", "TransformerState"]
