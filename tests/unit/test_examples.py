"""The yardstick of the demo against a model of dictionaries."""

import math
from collections import Counter

import numpy as np
import pytest

from examples.demo import library_folders
from examples.order2 import Order2Model


def dictionary_probability(text, context, byte):
    """Witten-Bell interpolation, straight from its definition."""
    probability = 1 / 256
    for order in range(len(context) + 1):
        suffix = context[len(context) - order :]
        followers = Counter(
            text[i + order] for i in range(len(text) - order) if tuple(text[i : i + order]) == tuple(suffix)
        )
        total, kinds = sum(followers.values()), len(followers)
        if total:
            probability = (followers[byte] + kinds * probability) / (total + kinds)
    return probability


def test_order2_probabilities_equal_a_dictionary_model():
    rng = np.random.default_rng(0)
    text = rng.choice([0, 65, 66, 255], 300, p=[0.1, 0.5, 0.3, 0.1])
    model = Order2Model(text)
    contexts = [(65, 66), (0, 255), (66, 66), (7, 65), (65, 7), (7, 8)]
    for context in contexts:
        for byte in (0, 65, 66, 255, 9):
            got = model.probability(np.array([context]), np.array([byte]))[0]
            assert got == pytest.approx(dictionary_probability(text.tolist(), list(context), byte), rel=1e-12)


def test_order2_probabilities_add_up_to_one():
    model = Order2Model(np.frombuffer(b"how much wood would a woodchuck chuck", np.uint8))
    for context in ((111, 117), (1, 2), (119, 111)):
        total = model.probability(np.tile(context, (256, 1)), np.arange(256)).sum()
        assert total == pytest.approx(1, rel=1e-12)


def test_order2_bits_are_mean_code_lengths():
    model = Order2Model(np.frombuffer(b"abcabdabcabe" * 5, np.uint8))
    row = np.frombuffer(b"abcab", np.uint8).astype(np.int64)
    probabilities = [
        model.probability(np.array([context]), np.array([byte]))[0]
        for context, byte in ((b"aa", 98), (b"ab", 99), (b"bc", 97), (b"ca", 98))
        for context in [tuple(context)]
    ]
    assert model.bits_per_byte(row[None]) == pytest.approx(-sum(map(math.log2, probabilities)) / 4, rel=1e-12)


def test_the_demo_finds_the_standard_library_without_tests():
    patterns = library_folders()
    assert any(pattern.endswith("json/*.py") for pattern in patterns)
    assert not any("site-packages" in pattern or "/test/" in pattern for pattern in patterns)
