"""The library inside a process: floating-point environment, fork, Ctrl-C, memory that was not zero."""

import itertools
import json
import os
import pathlib
import subprocess
import sys

import floating_point as fp
import numpy as np
import pytest
from bits_models import CONFIGS, ids, weights
from test_bits_everywhere import SOURCE, reference

from mojolearn import Mamba3Block, TransformerBlock, lowbit
from mojolearn.config import SambaConfig
from mojolearn.inference import SambaInference
from mojolearn.stack import SambaStack
from mojolearn.training import AdamW, Generator, WarmupCosineLR, WarmupLinearLR, clip_grad_norm_, cross_entropy

HERE = pathlib.Path(__file__).resolve().parent

WORDS = [
    rounding | flush | fp.DEFAULT
    for rounding, flush in itertools.product(
        fp.ROUNDING.values(), (0, fp.FLUSH_RESULTS, fp.FLUSH_RESULTS | fp.FLUSH_OPERANDS)
    )
]
# exceptions that trap: invalid operation, division by zero, overflow, underflow
WORDS.append(fp.DEFAULT & ~0x0E80)


def run(program, timeout=60, **environment):
    environment = {**os.environ, **environment}
    environment["PYTHONPATH"] = os.pathsep.join([str(SOURCE), str(HERE), environment.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], env=environment, capture_output=True, text=True, timeout=timeout
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


X = np.random.default_rng(1).standard_normal((2, 70, 32)).astype(np.float32)
LOW_BITS = np.linspace(-3, 3, 97 * 32, dtype=np.float32).reshape(97, 32)


def everything():
    """Results of all public parts, by name, as bytes."""
    config = SambaConfig(97, 32, ("mamba3", "attention"), n_heads=2, intermediate=48, dropout=0.1, norm_eps=3e-6)
    stack = SambaStack(config, generator=Generator(5), lr_schedule=WarmupCosineLR(1e-3, 3, 9), max_norm=0.5)
    tokens = ids(2, 70)
    results = {"initial": stack.flat.copy(), "step": stack.train_step(tokens, tokens), "trained": stack.flat.copy()}
    results["loss"] = stack.loss(tokens, tokens)
    served = SambaInference(config, lowbit.pack({**stack.parameters(), "embed.weight": LOW_BITS}, "int8"))
    state = served.allocate_state(2, 80)
    results["prefill"], results["decode"] = served.forward(tokens, state), served.step(tokens[:, 0], state)
    results["logprobs"] = served.token_logprobs(tokens)
    for fmt in ("bfloat16", "int8"):
        results[fmt] = lowbit.materialize_one(lowbit.pack_one(LOW_BITS, fmt))
    for kind, layer, options in ((Mamba3Block, 0, {}), (TransformerBlock, 1, {"n_heads": 2})):
        names = [name for name, _ in config.block_shapes(config.layers[layer])]
        block = kind({name: stack.parameters()[f"layers.{layer}.{name}"] for name in names}, **options)
        results[f"{kind.__name__}.forward"] = block.forward(X)
        results |= {f"{kind.__name__}.{name}": value for name, value in block.backward(X, X).items()}
    generator = Generator(3)
    results["normal"], results["uniform"] = generator.normal((9,), 0.1, 0.3), generator.uniform((9,), -0.1, 0.7)
    results["kaiming"], results["xavier"] = generator.kaiming_normal((4, 5), 5), generator.xavier_normal((4, 5), 4, 5)
    results["dropout"] = generator.dropout(X, 0.3)[0]
    parameters, grads = [X[0].copy()], [X[1].copy()]
    optimizer = AdamW(parameters, lr=1e-3, lr_schedule=WarmupCosineLR(1e-3, 3, 9))
    results["norm"], results["AdamW"] = optimizer.step(grads, 0.7), parameters[0]
    results["clip"] = clip_grad_norm_(grads, 0.1)
    results["cross_entropy"] = cross_entropy(X[0], np.arange(70) % 32, label_smoothing=0.1)
    for schedule in (WarmupCosineLR, WarmupLinearLR):
        results[schedule.__name__] = schedule(1e-3, 3, 9).lr_values(9)
    return {k: repr(v) if isinstance(v, (dict, float)) else np.asarray(v).tobytes() for k, v in results.items()}


@pytest.mark.skipif(not fp.AVAILABLE, reason="needs x86-64 Linux")
def test_floating_point_environment():
    """Results do not depend on the caller's rounding and flush mode, and the library leaves it as it was."""
    want = everything()
    before = fp.control_word()
    for word in WORDS:
        fp.set_control_word(word)
        try:
            got = everything()
            after = fp.control_word()
        finally:
            fp.set_control_word(before)
        assert after == word
        wrong = [name for name in want if got[name] != want[name]]
        assert not wrong, f"control word {word:#x}: results {wrong}"


@pytest.mark.skipif(not fp.AVAILABLE, reason="needs x86-64 Linux")
def test_floating_point_environment_after_a_refusal():
    stack = SambaStack(CONFIGS["hybrid"], weights=weights("hybrid"))
    stack.parameters()["layers.0.out_proj.weight"][...] = 3e38
    tokens = ids(2, 9)
    calls = [
        lambda: stack.forward(tokens),
        lambda: stack.train_step(tokens, tokens),
        lambda: stack.step(tokens[:, 0], stack.allocate_state(2, 4)),
        lambda: stack.forward(tokens, lengths=[3, 9]),
    ]
    before, word = fp.control_word(), fp.DEFAULT | fp.ROUNDING["up"] | fp.FLUSH_RESULTS
    for call in calls:
        fp.set_control_word(word)
        try:
            with pytest.raises(ValueError):
                call()
            after = fp.control_word()
        finally:
            fp.set_control_word(before)
        assert after == word


def test_import_leaves_the_environment_alone():
    program = """
import sys
assert sys.float_info.min / 2 != 0
import mojolearn
assert sys.float_info.min / 2 != 0
import numpy as np
from mojolearn.training import Generator
config = mojolearn.SambaConfig(16, 32, ("mamba3",))
stack = mojolearn.SambaStack(config, generator=Generator(0))
stack.train_step(np.ones((2, 3), int), np.ones((2, 3), int))
assert sys.float_info.min / 2 != 0 and np.float32(1e-38) / np.float32(10) != 0
print("done")
"""
    assert run(program) == "done\n"


def test_memory_that_was_not_zero():
    """Nothing is read before it is written: fresh memory filled with junk gives the same bits."""
    program = f"""
import sys
sys.argv = ["", "identical", "8", "2", "-1"]
sys.path.insert(0, {str(HERE)!r})
import digest_run
digest_run.main()
"""
    outputs = {run(program, MALLOC_PERTURB_=value) for value in ("0", "165", "255")}
    assert len(outputs) == 1
    assert json.loads(outputs.pop())[0] == reference("identical")[0]


FORK = """
import multiprocessing, warnings
import numpy as np
import mojolearn
from bits_models import CONFIGS, ids, weights

mojolearn.set_num_threads(3)

def work(seed):
    stack = mojolearn.SambaStack(CONFIGS["hybrid"], weights=weights("hybrid"))
    stack.train_step(ids(2, 40, seed), ids(2, 40, seed + 1))
    return stack.forward(ids(2, 40)).tobytes()

def main():
    want = [work(seed) for seed in range(4)]
    warnings.simplefilter("ignore", DeprecationWarning)
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert pool.map(work, range(4)) == want
        assert pool.map(work, range(4)) == want
    assert [work(seed) for seed in range(4)] == want
    print("done")

main()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_fork():
    """A process that used threads and then forks keeps working, and so do its children."""
    assert run(FORK, timeout=120) == "done\n"


INTERRUPT = """
import os, signal, threading, time
import numpy as np
import mojolearn
from mojolearn.training import Generator

config = mojolearn.SambaConfig(256, 128, ("mamba3", "attention") * 2, n_heads=4, intermediate=256)
stack = mojolearn.SambaStack(config, generator=Generator(0), max_norm=1.0)
ids = np.random.default_rng(0).integers(0, 256, (4, 129))
stack.train_step(ids[:, :-1], ids[:, 1:])

def snapshot():
    state = stack.state_dict()
    return {k: v.tobytes() if isinstance(v, np.ndarray) else v for k, v in state.items()}

old = snapshot()
began = time.monotonic()
stack.train_step(ids[:, :-1], ids[:, 1:])
duration = time.monotonic() - began
hits = set()
for i in range(12):
    stack.load_state_dict({k: np.frombuffer(v, np.int32 if k == "buf_initialized" else np.float32)
                           if isinstance(v, bytes) else v for k, v in old.items()})
    sent = []
    def send():
        time.sleep(duration * i / 11)
        sent.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGINT)
    thread = threading.Thread(target=send)
    try:
        thread.start()
        while True:
            stack.train_step(ids[:, :-1], ids[:, 1:])
    except KeyboardInterrupt:
        waited = time.monotonic() - sent[0]
    thread.join()
    assert waited < 1.0, waited
    now = snapshot()
    steps = now["t"] - old["t"]
    if steps == 0:
        assert now == old
    else:
        # The same state as that many undisturbed steps.
        other = mojolearn.SambaStack(config, generator=Generator(0), max_norm=1.0)
        other.train_step(ids[:, :-1], ids[:, 1:])
        for _ in range(steps):
            other.train_step(ids[:, :-1], ids[:, 1:])
        assert other.flat.tobytes() == now["parameters"]
    hits.add(steps > 0)
assert False in hits
print("done")
"""


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")
def test_ctrl_c():
    """Ctrl-C stops a step soon, and the stack then is that of whole steps."""
    assert run(INTERRUPT, timeout=120) == "done\n"
