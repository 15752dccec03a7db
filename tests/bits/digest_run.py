"""A training run and its logits as two digests; run in a process of its own with the environment to be tested.

python digest_run.py MODE STEPS ACCUMULATION_STEPS RESUME_AT
"""

import hashlib
import json
import os
import sys
import tempfile

import numpy as np

from mojolearn.config import SambaConfig
from mojolearn.inference import SambaInference
from mojolearn.stack import SambaStack
from mojolearn.training import Generator, WarmupCosineLR

CONFIG = SambaConfig(
    vocab=97, d_model=64, layers=("mamba3", "attention"), n_heads=4, n_kv_heads=2, intermediate=96, dropout=0.1
)


def batch(step):
    rng = np.random.default_rng(step)
    ids, targets = rng.integers(0, CONFIG.vocab, (2, 4, 37))
    targets[step % 4, : step % 11] = -100
    return ids, targets


def train(mode, steps, accumulation_steps, resume_at):
    stack = SambaStack(
        CONFIG,
        generator=Generator(7),
        lr_schedule=WarmupCosineLR(3e-3, 4, steps),
        max_norm=1.0,
        accumulation_steps=accumulation_steps,
        numeric_mode=mode,
    )
    logs = []
    for step in range(steps):
        if step == resume_at:
            with tempfile.TemporaryDirectory() as folder:
                path = os.path.join(folder, "checkpoint")
                stack.save_checkpoint(path)
                stack = SambaStack.from_checkpoint(path)
        logs.append(stack.train_step(*batch(step)))
    state = stack.state_dict()
    digest = hashlib.sha256(json.dumps([logs, state["rng"]]).encode())
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        digest.update(state[name].tobytes())
    return stack, digest.hexdigest()


def logits(model):
    """Digest of the logits of a batch; every way to compute them must give the same."""
    ids = np.random.default_rng(0).integers(0, CONFIG.vocab, (3, 80))
    want = model.forward(ids)
    state = model.allocate_state(3, 80)
    parts = [model.forward(ids[:, :30], state), model.forward(ids[:, 30:66], state)]
    parts += [model.step(ids[:, t], state)[:, None] for t in range(66, 80)]
    assert np.concatenate(parts, 1).tobytes() == want.tobytes(), "split prefill and steps"
    lengths = [80, 5, 66]
    ragged = model.forward(ids, lengths=lengths)
    for row, length in enumerate(lengths):
        assert ragged[row, :length].tobytes() == want[row, :length].tobytes(), "ragged rows"
        assert model.forward(ids[row : row + 1]).tobytes() == want[row].tobytes(), "batch composition"
    return hashlib.sha256(want.tobytes()).hexdigest()


def main():
    mode, *numbers = sys.argv[1:]
    stack, trained = train(mode, *map(int, numbers))
    served = SambaInference(CONFIG, stack.parameters(), numeric_mode=mode)
    print(json.dumps([trained, logits(stack), logits(served)]))


if __name__ == "__main__":
    main()
