"""Samba language models on the CPU: Mamba-3 and attention layers, trained and served with reproducible bits."""

__version__ = "0.1.0"
