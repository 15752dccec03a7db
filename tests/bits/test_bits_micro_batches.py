"""Promise: the step does not depend on `accumulation_steps`, nor on how many tokens the head takes at a time."""

import numpy as np
import pytest
from bits_models import CONFIGS, MODES, assert_same_bits, ids, weights
from hypothesis import given, settings
from hypothesis import strategies as st

from mojolearn._core import linalg
from mojolearn._gradients import GradientSink, TokenFold, leaf_size
from mojolearn.config import SambaConfig
from mojolearn.stack import SambaStack
from mojolearn.training import Generator, WarmupCosineLR


def run(name, mode, tokens, targets, pieces, steps=2, **options):
    """Everything that a few steps with dropout, clipping and a schedule leave behind."""
    config = SambaConfig.from_dict({**CONFIGS[name].to_dict(), "dropout": 0.2})
    stack = SambaStack(
        config,
        weights=weights(name),
        lr_schedule=WarmupCosineLR(1e-2, 1, 5),
        max_norm=0.7,
        accumulation_steps=pieces,
        numeric_mode=mode,
        **options,
    )
    logs = [stack.train_step(tokens, targets) for _ in range(steps)]
    state = stack.state_dict()
    return logs, [state[key] for key in ("parameters", "exp_avg", "exp_avg_sq")], state["rng"]


def assert_same_run(got, want):
    assert got[0] == want[0] and got[2] == want[2]
    for name, one, other in zip(("parameters", "exp_avg", "exp_avg_sq"), got[1], want[1]):
        assert_same_bits(one, other, name)


def divisors(rows):
    return [n for n in range(2, rows + 1) if rows % n == 0]


# (rows, length): one leaf cut, many leaves cut at odd places, boundaries on leaves, a short last leaf.
SHAPES = [(4, 31), (6, 50), (4, 64), (8, 48), (3, 100)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_divisor(name, mode, shape):
    tokens = ids(*shape)
    targets = ids(*shape, seed=1)
    targets[0, : shape[1] // 2] = -100
    targets[-1] = -100  # one micro-batch may have no target at all
    want = run(name, mode, tokens, targets, 1)
    for pieces in divisors(shape[0]):
        assert_same_run(run(name, mode, tokens, targets, pieces), want)


@pytest.mark.parametrize("name", ["hybrid", "mamba"])
@pytest.mark.parametrize("rows", [1, 50, 128, 300])
def test_head_in_tiles(name, rows, monkeypatch):
    tokens, targets = ids(4, 90), ids(4, 90, seed=1)
    want = run(name, "identical", tokens, targets, 1)
    monkeypatch.setattr("mojolearn.model.HEAD_BYTES", rows * 97 * 4)
    for pieces in (1, 2):
        assert_same_run(run(name, "identical", tokens, targets, pieces), want)


def test_documented_example():
    config = SambaConfig(vocab=256, d_model=64, layers=("mamba3", "mamba3"))
    tokens = np.random.default_rng(0).integers(0, 256, (4, 32)).astype(np.int32)
    results = []
    for pieces in (1, 2, 4):
        stack = SambaStack(config, generator=Generator(7), max_norm=1.0, accumulation_steps=pieces)
        results.append((stack.train_step(tokens[:, :-1], tokens[:, 1:]), stack.flat.tobytes()))
    assert results[0] == results[1] == results[2]


def test_all_targets_ignored():
    tokens = ids(4, 20)
    for pieces in (1, 2):
        stack = SambaStack(CONFIGS["hybrid"], weights=weights("hybrid"), accumulation_steps=pieces)
        loss, grads = stack.loss_and_grads(tokens, np.full_like(tokens, -100))
        assert loss == 0.0 and all(not grad.any() for grad in grads)
        assert stack.train_step(tokens, np.full_like(tokens, -100))["loss"] == 0.0
        assert np.isfinite(stack.flat).all()


def test_gradient_of_a_piece_uses_the_divisor_of_the_step():
    """Micro-batches of uneven target counts sum to the whole batch's gradient."""
    stack = SambaStack(CONFIGS["hybrid"], weights=weights("hybrid"))
    tokens, targets = ids(4, 12), ids(4, 12, seed=1)
    for row, keep in enumerate((7, 1, 0, 12)):
        targets[row, keep:] = -100
    loss, want = stack.loss_and_grads(tokens, targets)
    total, sums = 0.0, [0.0] * len(want)
    for row in range(4):
        part, grads = stack.loss_and_grads(tokens[row : row + 1], targets[row : row + 1], num_items=20)
        total += part
        sums = [one + two for one, two in zip(sums, grads)]
    assert total == pytest.approx(loss, rel=1e-5)
    for got, value in zip(sums, want):
        np.testing.assert_allclose(got, value, rtol=0, atol=1e-5 * np.abs(value).max() + 1e-9)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_sums_continue_wherever_they_are_cut(data):
    total = data.draw(st.integers(1, 900), "tokens")
    cuts = sorted(data.draw(st.sets(st.integers(1, total), max_size=6), "cuts") | {total})
    rng = np.random.default_rng(total)
    dc, a = rng.standard_normal((2, total, 5)).astype(np.float32)
    want, sums = np.empty((5, 5), np.float32), np.empty(5, np.float32)
    linalg.gemm_tn(dc, a, want, 2)
    linalg.colsum(dc, sums, 2)
    sink = GradientSink(np.empty(30, np.float32), ["w", "b"], [(5, 5), (5,)], [0, 25])
    sink.begin(total, 2, 0)
    first = 0
    for cut in cuts:
        sink.piece(cut - first)
        sink.linear("w", dc[first:cut], a[first:cut])
        sink.colsum("b", dc[first:cut])
        first = cut
    assert_same_bits(sink.view("w"), want, "product")
    assert_same_bits(sink.view("b"), sums, "column sum")
    assert sink.extra_bytes <= (np.log2(max(total / leaf_size(total), 1)) + 2) * 30 * 4


@pytest.mark.parametrize("total", [1, 128, 129, 1000, 131072, 131073, 500_000])
def test_shape_of_the_sum(total):
    """The parts of any split make one tree: leaves in pairs, level by level, an odd last one moving up."""
    leaf = leaf_size(total)
    level = [[i, min(i + leaf, total)] for i in range(0, total, leaf)]
    assert len(level) <= 1024

    def tree(nodes):
        while len(nodes) > 1:
            nodes = [nodes[i : i + 2] if i + 1 < len(nodes) else nodes[i] for i in range(0, len(nodes), 2)]
        return nodes[0]

    rng = np.random.default_rng(total)
    for _ in range(5):
        cuts = sorted({*rng.integers(1, total + 1, 4).tolist(), total})
        fold, buffers, first = TokenFold(total), {}, 0
        for cut in cuts:
            for part in fold.advance(cut - first):
                start, stop = first + part.start, first + part.stop
                if part.seed:
                    assert buffers[part.depth][1] == start
                    buffers[part.depth] = [buffers[part.depth][0], stop]
                else:
                    buffers[part.depth] = tree([[i, min(i + leaf, stop)] for i in range(start, stop, leaf)])
                for depth in range(part.depth, part.depth - part.merges, -1):
                    buffers[depth - 1] = [buffers[depth - 1], buffers[depth]]
            first = cut
        assert buffers[0] == tree(level)


def test_one_piece_costs_one_buffer():
    sink = GradientSink(np.empty(4, np.float32), ["w"], [(2, 2)], [0])
    sink.begin(1000, 1, 0)
    sink.piece(1000)
    sink.linear("w", *np.ones((2, 1000, 2), np.float32))
    assert sink.extra_bytes == 0 and (sink.view("w") == 1000).all()
