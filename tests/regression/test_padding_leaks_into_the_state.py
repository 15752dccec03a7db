"""Reported: padding tokens leak into the recurrent state of a row."""

import numpy as np
import pytest
from report_model import VOCAB, model, new_stack, same, tokens

LENGTHS = (3, 9, 17)


@pytest.mark.parametrize("padding", [0, VOCAB - 1])
def test_rows_do_not_see_padding(padding):
    ids = tokens(3, 17)
    for row, length in zip(ids, LENGTHS):
        row[length:] = padding
    together = model().forward(ids, lengths=LENGTHS)
    for i, length in enumerate(LENGTHS):
        assert same(together[i, :length], model().forward(ids[i : i + 1, :length])[0])


def test_padding_gives_no_gradient():
    stack, ids = new_stack(), tokens(3, 17)
    targets = ids.copy()
    for row, length in zip(targets, LENGTHS):
        row[length:] = -100
    _, want = stack.loss_and_grads(ids, targets)
    other = ids.copy()
    other[0, LENGTHS[0] :] = (ids[0, LENGTHS[0] :] + 1) % VOCAB
    # A token after the last target of its row changes no gradient but, by its zeros, that of no table row either.
    _, got = stack.loss_and_grads(other, targets)
    assert all((a == b).all() for a, b in zip(got, want))
    ignored = np.full_like(targets, -100)
    loss, zeros = stack.loss_and_grads(ids, ignored)
    assert loss == 0.0
    assert not any(gradient.any() for gradient in zeros)
