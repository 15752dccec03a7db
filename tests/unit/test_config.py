"""`SambaConfig`: sizes, defaults, registry, value semantics."""

import copy
import json
import pickle

import numpy as np
import pytest

from mojolearn.config import SambaConfig

HYBRID = {"vocab": 50, "d_model": 64, "layers": ("mamba3", "attention"), "n_heads": 4, "intermediate": 96}


def test_defaults():
    config = SambaConfig(256, 64, ["mamba3", "mamba3"])
    assert config.layers == ("mamba3", "mamba3")
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.intermediate) == (None,) * 4
    assert config.tie_embeddings is True and config.dropout == 0.0
    assert config.norm_eps == 9.999999747378752e-06
    assert (SambaConfig(**HYBRID).n_kv_heads, SambaConfig(**HYBRID).head_dim) == (4, 16)


def test_to_dict_is_json_and_rebuilds():
    config = SambaConfig(**HYBRID, n_kv_heads=2, dropout=0.1)
    fields = config.to_dict()
    assert list(fields) == [
        "vocab",
        "d_model",
        "layers",
        "n_heads",
        "n_kv_heads",
        "head_dim",
        "intermediate",
        "tie_embeddings",
        "norm_eps",
        "dropout",
    ]
    assert fields["dropout"] == float(np.float32(0.1))
    again = SambaConfig.from_dict(json.loads(json.dumps({**fields, "unknown": 1})))
    assert again == config and hash(again) == hash(config)
    assert again.to_dict() == fields


def test_value_semantics():
    config = SambaConfig(**HYBRID)
    assert config != SambaConfig(**{**HYBRID, "vocab": 51}) and config != "config"
    assert pickle.loads(pickle.dumps(config)) == config == copy.deepcopy(config)
    assert "vocab=50" in repr(config) and eval(repr(config)) == config
    with pytest.raises(AttributeError):
        config.vocab = 3


def test_numpy_scalars_become_python():
    config = SambaConfig(np.int64(50), np.uint8(64), np.array(["mamba3"]), norm_eps=np.float32(1e-5))
    assert type(config.vocab) is int and type(config.layers[0]) is str and type(config.norm_eps) is float
    json.dumps(config.to_dict())


def test_registry():
    config = SambaConfig(**HYBRID, n_kv_heads=2, tie_embeddings=False)
    names = [name for name, _ in config.registry()]
    assert names[0] == "embed.weight" and names[-2:] == ["norm_f.weight", "lm_head.weight"]
    shapes = dict(config.registry())
    assert shapes["layers.0.in_proj.weight"] == (4 * 64 + 256 + 3 * 2 + 32, 64)
    assert shapes["layers.0.B_bias"] == (2, 128) and shapes["layers.0.out_proj.weight"] == (64, 128)
    assert shapes["layers.1.k_proj.weight"] == (32, 64) and shapes["layers.1.down_proj.weight"] == (64, 96)
    assert config.num_parameters == 81540  # as in the golden file of this shape
    assert SambaConfig(64, 64, ("mamba3", "mamba3")).num_parameters == 92616


def test_block_shapes_refuses_unknown_kinds():
    with pytest.raises(ValueError, match="kind must be one of"):
        SambaConfig(**HYBRID).block_shapes("conv")
    with pytest.raises(ValueError, match="n_heads and intermediate"):
        SambaConfig(8, 32, ("mamba3",)).block_shapes("attention")


def test_accepted_edges():
    assert SambaConfig(8, 32, ("mamba3",), norm_eps=0).norm_eps == 0.0
    assert SambaConfig(8, 32, ("mamba3",), n_heads=3).n_heads == 3  # unused without attention
    assert SambaConfig(8, 2, ("attention",), n_heads=1, intermediate=1).head_dim == 2
    assert SambaConfig(8, 32, ("mamba3",), tie_embeddings=np.bool_(False)).tie_embeddings is False
