"""`SambaStack`: construction, parameters, steps that fail, state, copies."""

import copy
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest

import mojolearn
from mojolearn.config import SambaConfig
from mojolearn.stack import SambaStack
from mojolearn.training import AdamW, ConstantLR, Generator, clip_grad_norm_, cross_entropy

SOURCE = str(pathlib.Path(mojolearn.__file__).resolve().parents[1])
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([SOURCE, os.environ.get("PYTHONPATH", "")])}

CONFIG = SambaConfig(40, 32, ("mamba3", "attention"), n_heads=2, intermediate=24, tie_embeddings=False)
RNG = np.random.default_rng(0)
X, Y = RNG.integers(0, 40, (2, 4, 9)).astype(np.int32)


def new(**options):
    return SambaStack(CONFIG, generator=Generator(3), **options)


def snapshot(stack):
    state = stack.state_dict()
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in state.items()}, stack.last_


def test_layout():
    stack = new()
    assert stack.names == [name for name, _ in CONFIG.registry()]
    assert stack.shapes == [shape for _, shape in CONFIG.registry()]
    assert stack.n_total == stack.flat.size == CONFIG.num_parameters
    for (name, value), offset in zip(stack.parameters().items(), stack.offsets):
        assert np.shares_memory(value, stack.flat[offset : offset + 1]), name
    assert isinstance(stack.optimizer, AdamW) and stack.last_ is None and stack.extra is None


def test_parameters_are_live():
    stack = new()
    before = stack.forward(X)
    stack.parameters()["norm_f.weight"][...] = 2.0
    assert np.array_equal(stack.forward(X), 2 * before)
    stack.flat[...] = 0.0
    assert not stack.forward(X).any()


def test_weights_are_copied():
    weights = {name: value.copy() for name, value in new().parameters().items()}
    stack = SambaStack(CONFIG, weights)
    weights["embed.weight"][...] = 0.0
    assert np.array_equal(stack.forward(X), new().forward(X))
    assert stack.generator.state_dict() == {"seed": 0, "counter": 0}


def test_initialization_takes_a_stream_for_each_tensor_that_draws():
    stack = new()
    drawn = [n for n, s in CONFIG.registry() if (len(s) == 2 and n.endswith(".weight")) or n.endswith("dt_bias")]
    assert stack.generator.counter == len(drawn)
    assert (stack.parameters()["layers.0.D"] == 1).all()
    assert (stack.parameters()["layers.0.B_bias"] == 1).all()
    bias = stack.parameters()["layers.0.dt_bias"]
    assert (bias >= -4).all() and (bias < -2).all()


def test_refused_construction_takes_no_stream():
    generator = Generator(1)
    for options in ({"lr": np.nan}, {"betas": (1.0, 0.9)}, {"max_norm": -1.0}, {"numeric_mode": "x"}):
        with pytest.raises(ValueError):
            SambaStack(CONFIG, generator=generator, **options)
    assert generator.counter == 0


def test_load_weights():
    stack, other = new(), SambaStack(CONFIG, generator=Generator(4))
    assert stack.load_weights(other.parameters()) is None
    assert np.array_equal(stack.flat, other.flat)
    swapped = dict(stack.parameters())
    names = ("layers.1.q_proj.weight", "layers.1.k_proj.weight")
    swapped[names[0]], swapped[names[1]] = swapped[names[1]], swapped[names[0]]
    want = [value.copy() for value in swapped.values()]
    stack.load_weights(swapped)
    for got, value in zip(stack.parameters().values(), want):
        assert np.array_equal(got, value)


def test_loss_is_the_mean_cross_entropy():
    stack = new()
    targets = Y.copy()
    targets[1, 3:] = -100
    want = cross_entropy(stack.forward(X).reshape(-1, 40), targets.reshape(-1))
    assert stack.loss(X, targets) == want == stack.loss_and_grads(X, targets)[0]


def test_train_step_is_gradients_clip_and_adamw():
    stack = new(max_norm=0.05, lr=1e-2)
    parameters = [value.copy() for value in stack.parameters().values()]
    loss, grads = stack.loss_and_grads(X, Y)
    norm = clip_grad_norm_(grads, 0.05)
    AdamW(parameters, lr=1e-2).step(grads)
    out = stack.train_step(X, Y)
    assert out == {"loss": loss, "lr": float(np.float32(1e-2)), "step": 1, "total_norm": norm}
    assert out == stack.last_ and out is not stack.last_
    for got, want in zip(stack.parameters().values(), parameters):
        assert got.tobytes() == want.tobytes()


def test_gradients_are_the_callers():
    stack = new()
    _, first = stack.loss_and_grads(X, Y)
    kept = [grad.copy() for grad in first]
    stack.train_step(X, Y)
    stack.loss_and_grads(Y, X)
    for grad, want in zip(first, kept):
        assert np.array_equal(grad, want) and grad.flags.writeable


def test_dropout_stream_and_offset():
    config = SambaConfig.from_dict({**CONFIG.to_dict(), "dropout": 0.5})
    stack = SambaStack(config, generator=Generator(3))
    plain = stack.loss_and_grads(X, Y)[0]
    counter = stack.generator.counter
    assert stack.loss_and_grads(X, Y)[0] == plain == stack.loss(X, Y)
    masked = stack.loss_and_grads(X, Y, dropout_stream=5)[0]
    assert masked != plain and stack.loss_and_grads(X, Y, dropout_stream=5)[0] == masked
    assert stack.loss_and_grads(X, Y, dropout_stream=5, token_offset=9)[0] != masked
    assert stack.generator.counter == counter
    stack.train_step(X, Y)
    assert stack.generator.counter == counter + 1
    # The mask of a micro-batch is its slice of the step's.
    whole = stack.loss_and_grads(X, Y, num_items=36, dropout_stream=5)[0]
    parts = [
        stack.loss_and_grads(X[i : i + 2], Y[i : i + 2], num_items=36, dropout_stream=5, token_offset=9 * i)[0]
        for i in (0, 2)
    ]
    assert sum(parts) == pytest.approx(whole, rel=1e-6)


def test_no_dropout_takes_no_stream():
    stack = new()
    counter = stack.generator.counter
    stack.train_step(X, Y)
    assert stack.generator.counter == counter


def test_learning_rate_moves_once_a_step():
    rates = []
    for pieces in (1, 4):
        stack = new(lr_schedule=ConstantLR(1e-3, 4), accumulation_steps=pieces)
        rates.append([stack.train_step(X, Y)["lr"] for _ in range(6)])
    assert rates[0] == rates[1] == [float(np.float32(1e-3 * min(1, t / 4))) for t in range(1, 7)]


def test_steps_reuse_their_memory():
    stack = new(accumulation_steps=2)
    stack.train_step(X, Y)
    held = stack._workspace.nbytes, stack._sink.extra_bytes
    for _ in range(3):
        stack.train_step(X, Y)
    assert held == (stack._workspace.nbytes, stack._sink.extra_bytes)


class Interrupted(Exception):
    pass


@pytest.mark.parametrize("after", range(0, 60, 7))
def test_interrupt_changes_nothing(monkeypatch, after):
    """A failure at any kernel call of a step leaves the stack as it was."""
    config = SambaConfig.from_dict({**CONFIG.to_dict(), "dropout": 0.5})
    stack = SambaStack(config, generator=Generator(3), max_norm=1.0, accumulation_steps=2)
    stack.train_step(X, Y)
    before = snapshot(stack)
    calls = 0

    def failing(kernel):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls > after:
                raise Interrupted
            return kernel(*args, **options)

        return call

    with monkeypatch.context() as patch:
        for module, name in (
            ("mojolearn.stack.linalg", "linear"),
            ("mojolearn.stack.linalg", "gemm_nn"),
            ("mojolearn._gradients.linalg", "gemm_tn"),
            ("mojolearn._gradients.linalg", "colsum"),
            ("mojolearn._gradients.layers", "embedding_backward"),
        ):
            target = __import__("importlib").import_module(module.rsplit(".", 1)[0])
            kernels = getattr(target, module.rsplit(".", 1)[1])
            patch.setattr(kernels, name, failing(getattr(kernels, name)))
        with pytest.raises(Interrupted):
            stack.train_step(X, Y)
    assert snapshot(stack) == before
    twin = SambaStack(config, generator=Generator(3), max_norm=1.0, accumulation_steps=2)
    twin.train_step(X, Y)
    assert stack.train_step(X, Y) == twin.train_step(X, Y)
    assert snapshot(stack) == snapshot(twin)


def test_signal_in_the_commit_waits(monkeypatch):
    stack, twin = new(), new()
    step = stack.optimizer.step

    def interrupted(*args):
        signal.raise_signal(signal.SIGINT)
        return step(*args)

    monkeypatch.setattr(stack.optimizer, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stack.train_step(X, Y)
    twin.train_step(X, Y)
    assert snapshot(stack) == snapshot(twin)


def test_state_dict_holds_copies():
    stack = new()
    state = stack.state_dict()
    stack.train_step(X, Y)
    assert state["t"] == 0 and not state["exp_avg"].any()
    assert not np.shares_memory(state["parameters"], stack.flat)
    assert list(state)[:6] == ["schema", "profile", "experiment_profile", "numeric_mode", "config", "registry"]
    assert state["registry"][0] == {"name": "embed.weight", "shape": [40, 32], "offset": 0, "size": 1280}


def test_copies():
    stack = new(max_norm=1.0)
    stack.train_step(X, Y)
    stack.extra = {"note": [1]}
    for twin in (pickle.loads(pickle.dumps(stack)), copy.deepcopy(stack)):
        assert snapshot(twin) == snapshot(stack) and twin.extra == {"note": [1]}
        assert not np.shares_memory(twin.flat, stack.flat) and twin.generator is not stack.generator
        want = stack.loss(X, Y)
        assert twin.train_step(X, Y)["step"] == 2 and stack.loss(X, Y) == want


def test_extra_travels(tmp_path):
    stack = new()
    stack.save_checkpoint(tmp_path / "a", extra={"position": 3})
    again = SambaStack.from_checkpoint(tmp_path / "a")
    assert again.extra == {"position": 3}
    again.save_checkpoint(tmp_path / "b")
    assert SambaStack.from_checkpoint(tmp_path / "b").extra == {"position": 3}
    with pytest.raises(ValueError, match="extra"):
        again.save_checkpoint(tmp_path / "c", compression=None)


def test_saving_waits_for_a_step(tmp_path):
    stack = new()
    stop = threading.Event()

    def train():
        while not stop.is_set():
            stack.train_step(X, Y)

    worker = threading.Thread(target=train)
    worker.start()
    try:
        for i in range(5):
            stack.save_checkpoint(tmp_path / str(i))
    finally:
        stop.set()
        worker.join()
    twin = new()
    for i in range(5):
        saved = SambaStack.from_checkpoint(tmp_path / str(i))
        while twin.optimizer.t < saved.optimizer.t:
            twin.train_step(X, Y)
        assert snapshot(saved)[0] == snapshot(twin)[0]


def test_optimizer_settings_can_be_changed():
    stack = new()
    stack.optimizer.lr = 0.5
    assert stack.train_step(X, Y)["lr"] == 0.5
    assert stack.state_dict()["optimizer"]["lr"] == 0.5


def test_gradients_repeat():
    """The same call gives the same bits again, at any number of threads."""
    before = mojolearn.get_num_threads()
    stack = new()
    _, want = stack.loss_and_grads(X, Y)
    try:
        for threads in (1, 2, 4) * 4:
            mojolearn.set_num_threads(threads)
            for got, value in zip(stack.loss_and_grads(X, Y)[1], want):
                assert got.tobytes() == value.tobytes()
    finally:
        mojolearn.set_num_threads(before)


LARGE_VOCABULARY = """
import resource
import numpy as np
import mojolearn
from mojolearn.training import Generator

mojolearn.model.HEAD_BYTES = 8 << 20
config = mojolearn.SambaConfig(50_000, 32, ("mamba3",))
stack = mojolearn.SambaStack(config, generator=Generator(0))
ids = np.random.default_rng(0).integers(0, 50_000, (1, 600))
stack.loss(ids[:, :20], ids[:, :20])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
stack.loss_and_grads(ids, ids)
stack.loss(ids, ids)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux only")
def test_the_head_holds_one_bounded_buffer():
    """All logits would be 114 MiB; the gradient of the embedding and its counter are 6 MiB each."""
    done = subprocess.run([sys.executable, "-c", LARGE_VOCABULARY], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 80.0
