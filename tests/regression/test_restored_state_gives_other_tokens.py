"""Reported: after a recurrent state is restored other tokens follow."""

import pickle

from report_model import model, same, tokens

import mojolearn


def decode(state, ids):
    return [model().step(ids[:, t], state) for t in range(ids.shape[1])]


def test_snapshot_decode_restore(tmp_path):
    prompt, ids = tokens(2, 70), tokens(2, 20, seed=1)
    state = model().allocate_state(2, 90)
    model().forward(prompt, state)
    saved = state.to_dict()
    (tmp_path / "state").write_bytes(pickle.dumps(saved))
    clone = state.copy()
    want = decode(state, ids)
    restored = mojolearn.SambaState.from_dict(saved)
    reloaded = mojolearn.SambaState.from_dict(pickle.loads((tmp_path / "state").read_bytes()))
    for other in (restored, reloaded, clone):
        assert all(same(a, b) for a, b in zip(decode(other, ids), want))
