"""Optimizers, schedules, random draws, and the loss and layers as functions."""

from mojolearn._numerics import MODE_NAMES, mode_index
from mojolearn.training.accumulation import accumulate_grads, accumulation_is_aligned
from mojolearn.training.generator import Generator
from mojolearn.training.losses import clip_grad_norm_, cross_entropy
from mojolearn.training.optimizers import SGD, Adam, AdamW
from mojolearn.training.primitives import (
    embedding_backward,
    embedding_forward,
    linear_backward,
    linear_forward,
    rms_norm_backward,
    rms_norm_forward,
)
from mojolearn.training.schedules import ConstantLR, WarmupCosineLR, WarmupLinearLR

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ConstantLR",
    "Generator",
    "WarmupCosineLR",
    "WarmupLinearLR",
    "accumulate_grads",
    "accumulation_is_aligned",
    "clip_grad_norm_",
    "cross_entropy",
    "embedding_backward",
    "embedding_forward",
    "linear_backward",
    "linear_forward",
    "numeric_mode_used",
    "rms_norm_backward",
    "rms_norm_forward",
    "vendor_used",
]


def numeric_mode_used(numeric_mode=None):
    """Name of the numeric mode that training runs in: the one given, or the library default."""
    return MODE_NAMES[mode_index(numeric_mode)]


def vendor_used():
    """Kind of device that training runs on."""
    return "cpu"
