"""A block's shape, set anew after construction, would lead the kernels beyond its arrays and tables."""

import numpy as np
import pytest

from mojolearn import TransformerBlock


@pytest.mark.parametrize(
    "name", ["n_heads", "n_kv_heads", "head_dim", "window", "rope_theta", "max_positions", "norm_eps"]
)
def test_the_shape_of_a_block_is_fixed(name):
    weights = {"input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,)}
    weights |= {f"{letter}_proj.weight": (32, 32) for letter in "qkvo"}
    weights |= {"gate_proj.weight": (48, 32), "up_proj.weight": (48, 32), "down_proj.weight": (32, 48)}
    block = TransformerBlock({key: np.ones(shape, np.float32) for key, shape in weights.items()}, n_heads=4)
    before = getattr(block, name)
    with pytest.raises(AttributeError, match=name):
        setattr(block, name, 100_000)
    assert getattr(block, name) == before
