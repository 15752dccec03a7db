from mojolearn._typing import NumericMode
from mojolearn.training.accumulation import accumulate_grads as accumulate_grads
from mojolearn.training.accumulation import accumulation_is_aligned as accumulation_is_aligned
from mojolearn.training.generator import Generator as Generator
from mojolearn.training.losses import clip_grad_norm_ as clip_grad_norm_
from mojolearn.training.losses import cross_entropy as cross_entropy
from mojolearn.training.optimizers import SGD as SGD
from mojolearn.training.optimizers import Adam as Adam
from mojolearn.training.optimizers import AdamW as AdamW
from mojolearn.training.primitives import embedding_backward as embedding_backward
from mojolearn.training.primitives import embedding_forward as embedding_forward
from mojolearn.training.primitives import linear_backward as linear_backward
from mojolearn.training.primitives import linear_forward as linear_forward
from mojolearn.training.primitives import rms_norm_backward as rms_norm_backward
from mojolearn.training.primitives import rms_norm_forward as rms_norm_forward
from mojolearn.training.schedules import ConstantLR as ConstantLR
from mojolearn.training.schedules import WarmupCosineLR as WarmupCosineLR
from mojolearn.training.schedules import WarmupLinearLR as WarmupLinearLR

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

def numeric_mode_used(numeric_mode: NumericMode | None = None) -> NumericMode: ...
def vendor_used() -> str: ...
