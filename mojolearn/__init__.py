"""Samba language models on the CPU: Mamba-3 and attention layers, trained and served with reproducible bits."""

from mojolearn._numerics import (
    get_num_threads,
    get_numeric_mode,
    numeric_mode,
    set_num_threads,
    set_numeric_mode,
    show_config,
)

__version__ = "0.1.0"
