"""Every array of every golden file, compared by its bytes.

The files hold results of the public library (mode identical, CPU); they are never regenerated.
"""

import ast
import json
import pathlib

import numpy as np
import pytest

from mojolearn import lowbit
from mojolearn.blocks import Mamba3Block, TransformerBlock
from mojolearn.config import SambaConfig
from mojolearn.inference import SambaInference
from mojolearn.stack import SambaStack
from mojolearn.training import ConstantLR, Generator, WarmupCosineLR, WarmupLinearLR

HERE = pathlib.Path(__file__).resolve().parent
SCHEDULES = {"ConstantLR": ConstantLR, "WarmupLinearLR": WarmupLinearLR, "WarmupCosineLR": WarmupCosineLR}


def assert_same_bytes(got, want, what):
    got = np.ascontiguousarray(got)
    assert got.dtype == want.dtype and got.shape == want.shape, what
    if got.tobytes() != want.tobytes():
        differ = int((got.view(np.uint8) != want.view(np.uint8)).sum()) if got.ndim else 1
        raise AssertionError(f"{what}: {differ} bytes of {got.nbytes} differ, largest {np.abs(got - want).max()}")


def load(name):
    """The arrays of a file, and the set of names that a test still has to look at."""
    with np.load(HERE / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def group(arrays, prefix):
    return {key[len(prefix) :]: value for key, value in arrays.items() if key.startswith(prefix)}


FORWARD = ["forward_attention", "forward_hybrid", "forward_large_weights", "forward_mamba"]


@pytest.fixture(params=["inference", "stack"])
def build(request):
    def make(arrays):
        config = SambaConfig.from_dict(json.loads(str(arrays["config"])))
        model = SambaInference if request.param == "inference" else SambaStack
        return model(config, group(arrays, "w."), numeric_mode="identical")

    return make


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, build):
    arrays = load(name)
    assert_same_bytes(build(arrays).forward(arrays["ids"]), arrays["logits"], "logits")


@pytest.mark.parametrize("name", FORWARD)
def test_prefill_and_steps(name, build):
    arrays = load(name)
    model, ids = build(arrays), arrays["ids"]
    state, at, outputs = model.allocate_state(*ids.shape), 0, []
    for length in arrays["prefill"]:
        outputs.append(model.forward(ids[:, at : at + length], state))
        at += length
    for _ in range(int(arrays["steps"])):
        outputs.append(model.step(ids[:, at], state)[:, None])
        at += 1
    assert_same_bytes(np.concatenate(outputs, 1), arrays["carried_logits"], "carried logits")
    fields = group(arrays, "state.")
    assert fields
    for key, want in fields.items():
        layer, field = key.split(".")
        got = getattr(state.layers[int(layer)], field)
        got = got() if callable(got) else got
        if want.ndim:
            assert_same_bytes(got, want, key)
        else:
            assert got == int(want), key


def test_ragged(build):
    arrays = load("forward_ragged")
    got = build(arrays).forward(arrays["ids"], lengths=arrays["lengths"])
    assert_same_bytes(got, arrays["logits"], "logits")


TWO_ROWS = ["train_dropout", "train_hybrid", "train_readme"]
TRAIN = [*TWO_ROWS, "train_long"]


def make_stack(arrays, **options):
    config = SambaConfig.from_dict(json.loads(str(arrays["config"])))
    options = {**json.loads(str(arrays["stack_kw"])), **options}
    if str(arrays["schedule"]):
        name, fields = ast.literal_eval(str(arrays["schedule"]))
        options["lr_schedule"] = SCHEDULES[name](**fields)
    generator = Generator(int(arrays["gen_seed"]))
    return SambaStack(config, generator=generator, numeric_mode="identical", **options)


@pytest.mark.parametrize("name", TRAIN)
def test_initial_parameters(name):
    arrays = load(name)
    want = group(arrays, "init.")
    got = make_stack(arrays).parameters()
    assert list(got) == list(want)
    for key, value in want.items():
        assert_same_bytes(got[key], value, key)


@pytest.mark.parametrize("name", TRAIN)
def test_first_gradients(name):
    arrays = load(name)
    stack = make_stack(arrays)
    loss, grads = stack.loss_and_grads(arrays["x"][0], arrays["y"][0])
    assert np.float32(loss) == arrays["grad_loss"]
    want = group(arrays, "grad.")
    assert list(want) == stack.names
    for key, value in zip(stack.names, grads):
        assert_same_bytes(value, want[key], key)


@pytest.mark.parametrize(("name", "pieces"), [*((name, 1) for name in TRAIN), *((name, 2) for name in TWO_ROWS)])
def test_training(name, pieces):
    arrays = load(name)
    stack = make_stack(arrays, accumulation_steps=pieces)
    for x, y, want in zip(arrays["x"], arrays["y"], arrays["log"]):
        out = stack.train_step(x, y)
        norm = -1.0 if out["total_norm"] is None else out["total_norm"]
        assert [out["loss"], out["lr"], out["step"], norm] == want.tolist()
        assert stack.last_ == out
    for key, value in group(arrays, "final.").items():
        assert_same_bytes(stack.parameters()[key], value, key)
    state = stack.state_dict()
    assert_same_bytes(state["exp_avg"], arrays["exp_avg"], "exp_avg")
    assert_same_bytes(state["exp_avg_sq"], arrays["exp_avg_sq"], "exp_avg_sq")
    assert np.float32(stack.loss(arrays["x"][0], arrays["y"][0])) == arrays["eval_loss"]


@pytest.mark.parametrize("name", ["train_hybrid", "train_readme"])
def test_plain_checkpoint(name, tmp_path):
    """The trained state as a plain archive is the public library's file, and that file gives the state."""
    arrays = load(name)
    stack = make_stack(arrays)
    for x, y in zip(arrays["x"], arrays["y"]):
        stack.train_step(x, y)
    path = tmp_path / "plain.samba2"
    stack.save_checkpoint(path, compression=None)
    want = (HERE / f"{name}.samba2").read_bytes()
    assert path.read_bytes() == want
    read = SambaStack.from_checkpoint(HERE / f"{name}.samba2")
    for key, value in group(arrays, "final.").items():
        assert_same_bytes(read.parameters()[key], value, key)
    assert read.train_step(arrays["x"][0], arrays["y"][0]) == stack.train_step(arrays["x"][0], arrays["y"][0])
    assert read.flat.tobytes() == stack.flat.tobytes()
    served = SambaInference.from_checkpoint(HERE / f"{name}.samba2")
    for key, value in group(arrays, "final.").items():
        assert_same_bytes(served.parameters()[key], value, key)


def test_mamba_block():
    arrays = load("block_mamba3")
    block = Mamba3Block(group(arrays, "w."), numeric_mode="identical")
    x = arrays["x"]
    assert_same_bytes(block.forward(x), arrays["y"], "y")
    for report in ("h_last_", "k_last_", "v_last_", "theta_last_"):
        assert_same_bytes(getattr(block, report), arrays[report], report)
    grads = block.backward(x, arrays["dy"])
    want = group(arrays, "grad.")
    assert set(grads) == set(want)
    for key, value in want.items():
        assert_same_bytes(grads[key], value, key)


def test_mamba_block_input_states():
    arrays = load("block_mamba3")
    block = Mamba3Block(group(arrays, "w."), numeric_mode="identical")
    x = arrays["x"]
    state = block.allocate_state(len(x))
    state.set_input_states(arrays["in.theta"], arrays["in.h"], arrays["in.k"], arrays["in.v"])
    outputs = [block.forward(np.ascontiguousarray(x[:, :70]), state)]
    outputs += [block.step(np.ascontiguousarray(x[:, i]), state).reshape(len(x), 1, -1) for i in range(70, 90)]
    assert_same_bytes(np.concatenate(outputs, 1), arrays["y_from_input_states"], "y")
    assert_same_bytes(state.h, arrays["state_h"], "h")
    assert_same_bytes(state.theta, arrays["state_theta"], "theta")


def test_window_block():
    arrays = load("block_window")
    sizes = {name: int(arrays[name]) for name in ("n_heads", "n_kv_heads", "window")}
    block = TransformerBlock(group(arrays, "w."), numeric_mode="identical", **sizes)
    x = arrays["x"]
    assert_same_bytes(block.forward(x), arrays["y"], "y")
    grads = block.backward(x, arrays["dy"])
    want = group(arrays, "grad.")
    assert set(grads) == set(want)
    for key, value in want.items():
        assert_same_bytes(grads[key], value, key)
    batch, length, _ = x.shape
    state = block.allocate_state(batch, length)
    first = length // 3
    outputs = [block.forward(np.ascontiguousarray(x[:, :first]), state)]
    outputs += [block.step(np.ascontiguousarray(x[:, i]), state).reshape(batch, 1, -1) for i in range(first, length)]
    assert_same_bytes(np.concatenate(outputs, 1), arrays["y"], "carried y")
    assert_same_bytes(state.keys(), arrays["keys"], "keys")
    assert_same_bytes(state.values(), arrays["values"], "values")
    assert state.cached_tokens == int(arrays["cached_tokens"])


@pytest.mark.parametrize("seed", [0, 7, 123456789, 9223372036854775807])
def test_random_draws(seed):
    arrays = group(load("rng"), f"{seed}.")
    generator = Generator(seed)
    assert_same_bytes(generator.normal((37, 5), 0.0, 0.02), arrays["normal"], "normal")
    assert_same_bytes(generator.uniform((41,), -4.0, -2.0), arrays["uniform"], "uniform")
    assert_same_bytes(generator.kaiming_uniform((16, 24), fan_in=24), arrays["kaiming"], "kaiming_uniform")
    dropped, _ = generator.dropout(arrays["dropout_x"], 0.25, offset=100, stream=3)
    assert_same_bytes(dropped, arrays["dropout_y"], "dropout")


def test_lowbit():
    arrays = load("lowbit")
    bfloat16 = lowbit.pack_one(arrays["w"], "bfloat16")
    assert_same_bytes(bfloat16.bits, arrays["bf16_bits"], "bfloat16 bits")
    assert_same_bytes(lowbit.materialize_one(bfloat16), arrays["bf16_back"], "bfloat16 widened")
    int8 = lowbit.pack_one(arrays["w"], "int8")
    assert_same_bytes(int8.codes, arrays["int8_codes"], "int8 codes")
    assert_same_bytes(int8.exponents, arrays["int8_exponents"], "int8 exponents")
    assert_same_bytes(lowbit.materialize_one(int8), arrays["int8_back"], "int8 widened")
