"""An overflow in one token leaves the bits of all earlier ones alone, on every instruction set.

Zeros beyond the diagonal of a register tile, times infinity, once made NaNs of the tokens just before it, as many as
the tile of the instruction set had rows.
"""

import numpy as np
import pytest
from instruction_sets import RUN_HERE, differences, instruction_set

from mojolearn import Mamba3Block, SambaConfig, TransformerBlock

CONFIG = SambaConfig(2, 32, ("mamba3", "attention"), n_heads=2, n_kv_heads=1, intermediate=40)
ATTENTION = {"n_heads": 2, "n_kv_heads": 1}
CASES = {
    "mamba3": (Mamba3Block, {}, "block_norm.weight", "in_proj.weight", slice(64, 128)),
    "attention": (TransformerBlock, ATTENTION, "input_layernorm.weight", "v_proj.weight", slice(None)),
}


@pytest.mark.parametrize("name", RUN_HERE)
@pytest.mark.parametrize("block", CASES)
@pytest.mark.parametrize("at", [0, 5, 63, 83])
def test_overflow(block, name, at):
    cls, options, norm, values, rows = CASES[block]
    draw = np.random.default_rng(at)
    shapes = CONFIG.block_shapes(block)
    w = {key: (draw.standard_normal(shape) * 0.2).astype(np.float32) for key, shape in shapes}
    w[norm][:] = 2
    w[values][rows, 0] = 3e38
    x = draw.standard_normal((1, 100, 32)).astype(np.float32)
    x[..., 0] = 0
    x[0, at] = 0
    x[0, at, 0] = 1
    with instruction_set(name):
        made = cls(w, **options)
        y = made.forward(x)
        assert not np.isfinite(y[0, at]).all()
        if at:
            assert np.isfinite(y[:, :at]).all()
            assert differences(y[:, :at], made.forward(np.ascontiguousarray(x[:, :at]))) == 0
