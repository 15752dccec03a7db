"""The three models that every measurement of speed speaks of."""

TINY = {"vocab": 256, "d_model": 256, "layers": ["mamba3", "attention"] * 2, "n_heads": 4, "intermediate": 512}
SMALL = {"vocab": 8192, "d_model": 512, "layers": ["mamba3", "attention"] * 4, "n_heads": 8, "intermediate": 1536}
MEDIUM = {
    "vocab": 32000,
    "d_model": 1024,
    "layers": ["mamba3", "attention"] * 6,
    "n_heads": 16,
    "n_kv_heads": 4,
    "intermediate": 2816,
}
CONFIGS = {"tiny": TINY, "small": SMALL, "medium": MEDIUM}
for _name, _config in list(CONFIGS.items()):
    for _suffix, _kind in (("attn", "attention"), ("mamba", "mamba3")):
        CONFIGS[f"{_name}-{_suffix}"] = {**_config, "layers": [_kind] * len(_config["layers"])}


def random_weights(config, seed=0):
    """Weights of ordinary sizes, by registry name.

    Parameters
    ----------
    config : mojolearn.SambaConfig
    seed : int

    Returns
    -------
    dict of str to ndarray of float32
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in config.registry():
        if name.endswith("dt_bias"):
            value = rng.uniform(-4.0, -2.0, shape)
        elif len(shape) == 2 and name.endswith("weight"):
            value = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.02)
        else:
            value = np.ones(shape)
        weights[name] = np.ascontiguousarray(value, dtype=np.float32)
    return weights
