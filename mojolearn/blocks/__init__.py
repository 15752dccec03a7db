"""The two kinds of layers: Mamba-3 and causal attention with a gated MLP."""

from mojolearn.blocks.mamba3 import Mamba3Block, Mamba3State
from mojolearn.blocks.transformer import TransformerBlock, TransformerState

__all__ = ["Mamba3Block", "Mamba3State", "TransformerBlock", "TransformerState"]
