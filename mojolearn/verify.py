"""The promises about bits, checked on the machine at hand.

`verify` runs small models and compares: with shipped results of the public library, over thread counts, instruction
sets and micro-batches, token by token with whole passes, resumed with unbroken. Its digest is a function of all results
that have to be equal everywhere, so two machines can compare one line.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

import mojolearn
from mojolearn import _core, lowbit
from mojolearn import training as training_module
from mojolearn._typing import NumericMode, WeightFormat

__all__ = ["checks_for", "verify"]

MODES: tuple[NumericMode, ...] = ("identical", "deterministic")
THREADS = (1, 2, 3, 8)
CONFIG: dict[str, Any] = {
    "vocab": 101,
    "d_model": 64,
    "layers": ("mamba3", "attention", "mamba3"),
    "n_heads": 4,
    "n_kv_heads": 2,
    "intermediate": 96,
    "dropout": 0.1,
}
BATCH, LENGTH, STEPS, RESUMED_AT = 4, 72, 4, 2


class Failure(Exception):
    """A check did not hold."""


def digest(*arrays: np.ndarray) -> str:
    """SHA-256 over the bytes of arrays."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def _same(what: str, got: str, wanted: str) -> None:
    if got != wanted:
        raise Failure(f"{what} differs: {got[:16]} instead of {wanted[:16]}")


def _ids(vocab: int, *shape: int, seed: int = 0) -> np.ndarray:
    """Token ids that are the same with every version of NumPy."""
    words = np.random.Philox(key=seed).random_raw(int(np.prod(shape)))
    return (words % np.uint64(vocab)).astype(np.int32).reshape(shape)


class _threads:
    """A thread count for the time of a check."""

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> None:
        self.before = mojolearn.get_num_threads()
        mojolearn.set_num_threads(self.count)

    def __exit__(self, *exception: object) -> None:
        mojolearn.set_num_threads(self.before)


# ---------------------------------------------------------------------------------------------------------------------
# With models of our own


def _new_stack(mode: NumericMode, accumulation_steps: int = 1) -> Any:
    return mojolearn.SambaStack(
        mojolearn.SambaConfig(**CONFIG),
        generator=training_module.Generator(2024),
        lr_schedule=training_module.WarmupCosineLR(3e-3, 2, STEPS, 1e-4),
        max_norm=0.5,
        accumulation_steps=accumulation_steps,
        numeric_mode=mode,
    )


def _train(stack: Any, first: int, last: int) -> None:
    for step in range(first, last):
        ids = _ids(stack.config.vocab, BATCH, LENGTH + 1, seed=step)
        stack.train_step(ids[:, :-1], ids[:, 1:])


def _training_digest(stack: Any) -> str:
    """Of everything that a run leaves: its last loss, parameters, moments and random stream."""
    last = np.array([stack.last_["loss"], stack.last_["lr"], stack.last_["total_norm"]], dtype=np.float64)
    counter = np.array([stack.generator.state_dict()["counter"], stack.optimizer.t], dtype=np.int64)
    return digest(last, stack.flat, stack.optimizer.exp_avg, stack.optimizer.exp_avg_sq, counter)


def _run_digest(mode: NumericMode, accumulation_steps: int = 1) -> str:
    stack = _new_stack(mode, accumulation_steps)
    _train(stack, 0, STEPS)
    return _training_digest(stack)


# The run that the others are compared with, made once; `verify` forgets it first.
_whole_run = functools.cache(_run_digest)


def _model_digest(model: Any) -> str:
    return digest(model.forward(_ids(model.config.vocab, 2, LENGTH)))


def _check_shipped_training() -> str:
    expected = json.loads(resources.files("mojolearn").joinpath("_verify_data/expected.json").read_text())
    for case in expected["training"]:
        stack = mojolearn.SambaStack(
            mojolearn.SambaConfig.from_dict(case["config"]),
            generator=training_module.Generator(case["seed"]),
            lr_schedule=_schedule(case["schedule"]),
            numeric_mode="identical",
            **case["options"],
        )
        inputs, targets = np.array(case["inputs"], np.int32), np.array(case["targets"], np.int32)
        name = case["name"]
        _same(f"{name}: initial parameters", digest(stack.flat), case["initial"])
        _, gradients = stack.loss_and_grads(inputs[0], targets[0])
        _same(f"{name}: gradients", digest(*gradients), case["gradients"])
        for x, y, row in zip(inputs, targets, case["log"], strict=True):
            out = stack.train_step(x, y)
            got = [out["loss"], out["lr"], out["step"], -1.0 if out["total_norm"] is None else out["total_norm"]]
            if got != row:
                raise Failure(f"{name}: step {out['step']} gives {got} instead of {row}")
        _same(f"{name}: parameters", digest(stack.flat), case["final"])
        _same(f"{name}: first moments", digest(stack.optimizer.exp_avg), case["exp_avg"])
        _same(f"{name}: second moments", digest(stack.optimizer.exp_avg_sq), case["exp_avg_sq"])
        if stack.loss(inputs[0], targets[0]) != case["loss_after"]:
            raise Failure(f"{name}: the loss afterwards differs")
    return ""


def _schedule(described: Any) -> Any:
    if described is None:
        return None
    kind, values = described
    return getattr(training_module, kind)(**values)


def _check_shipped_lowbit() -> str:
    expected = json.loads(resources.files("mojolearn").joinpath("_verify_data/expected.json").read_text())["lowbit"]
    weights = np.frombuffer(base64.b64decode(expected["weights"]), "<f4").astype(np.float32)
    weights = weights.reshape(expected["shape"])
    int8, bf16 = lowbit.pack_one(weights, "int8"), lowbit.pack_one(weights, "bfloat16")
    _same("bfloat16", digest(bf16.bits), expected["bf16_bits"])
    _same("int8 codes", digest(int8.codes), expected["int8_codes"])
    _same("int8 exponents", digest(int8.exponents), expected["int8_exponents"])
    return ""


def _check_threads(mode: NumericMode) -> str:
    results = []
    for count in THREADS:
        with _threads(count):
            results.append(_run_digest(mode))
    for count, result in zip(THREADS[1:], results[1:], strict=True):
        _same(f"training with {count} threads", result, results[0])
    return results[0]


def _check_micro_batches(mode: NumericMode) -> str:
    whole = _whole_run(mode)
    for pieces in (2, 4):
        _same(f"training in {pieces} micro-batches", _run_digest(mode, pieces), whole)
    return whole


def _check_resume(mode: NumericMode) -> str:
    whole = _whole_run(mode)
    stack = _new_stack(mode)
    _train(stack, 0, RESUMED_AT)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "middle.ckpt"
        stack.save_checkpoint(path)
        stack = mojolearn.SambaStack.from_checkpoint(path)
    _train(stack, RESUMED_AT, STEPS)
    _same("the resumed run", _training_digest(stack), whole)
    return whole


def _check_instruction_sets(checkpoint: Path | None) -> str:
    here = _child_digest(checkpoint)
    for name in _core.BUILT:
        if name in _core.AVAILABLE and name != _core.ISA:
            _same(f"instruction set {name}", _child(checkpoint, name), here)
    return here


def _child_digest(checkpoint: Path | None) -> str:
    """What is compared between instruction sets."""
    if checkpoint is not None:
        return _model_digest(_load(checkpoint))
    parts = [_whole_run(mode) + _model_digest(_new_stack(mode)) for mode in MODES]
    return hashlib.sha256("".join(parts).encode()).hexdigest()


def _child(checkpoint: Path | None, name: str) -> str:
    """The same in a process of its own, which may force another instruction set."""
    environment = {**os.environ, "MOJOLEARN_ISA": name}
    folders = [str(Path(mojolearn.__file__).resolve().parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    command = [sys.executable, "-m", "mojolearn.verify"] + ([] if checkpoint is None else [str(checkpoint)])
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failure(f"instruction set {name}: {done.stderr.strip().splitlines()[-1:] or done.returncode}")
    return done.stdout.strip()


def _check_environment() -> str:
    """Subnormal numbers of the caller stay alive."""
    _new_stack("identical").forward(_ids(CONFIG["vocab"], 1, 8))
    if not np.float64(sys.float_info.min) / np.float64(2) > 0 or not np.float32(1e-38) / np.float32(16) > 0:
        raise Failure("the floating-point mode of the caller was changed")
    return ""


# ---------------------------------------------------------------------------------------------------------------------
# With any model


def _check_steps(model: Any) -> str:
    ids = _ids(model.config.vocab, 2, LENGTH)
    whole = model.forward(ids)
    splits: Sequence[Sequence[int]] = ((1,) * LENGTH, (37, LENGTH - 37), (16, 16, 5, LENGTH - 37), (LENGTH - 1, 1))
    for split in splits:
        state, at, parts = model.allocate_state(2, LENGTH), 0, []
        for length in split:
            if length == 1:
                parts.append(model.step(ids[:, at], state)[:, None])
            else:
                parts.append(model.forward(ids[:, at : at + length], state))
            at += length
        _same(f"in pieces of {sorted(set(split))}", digest(np.concatenate(parts, axis=1)), digest(whole))
    return digest(whole)


def _check_rows(model: Any) -> str:
    lengths = (LENGTH, 3, 17, 1, 64)
    ids = _ids(model.config.vocab, len(lengths), LENGTH)
    together, ragged = model.forward(ids), model.forward(ids, lengths=lengths)
    for row, length in enumerate(lengths):
        _same(f"row {row} of a batch", digest(together[row]), digest(model.forward(ids[row : row + 1])[0]))
        alone = model.forward(ids[row : row + 1, :length])[0]
        _same(f"a row of length {length}", digest(ragged[row, :length]), digest(alone))
    return digest(together, ragged)


def _check_packed(model: Any) -> str:
    digests = []
    formats: tuple[WeightFormat, ...] = ("bfloat16", "int8")
    for fmt in formats:
        packed = lowbit.pack(model.parameters(), fmt)
        mode = model.numeric_mode
        ids = _ids(model.config.vocab, 2, LENGTH)
        got = mojolearn.SambaInference(model.config, packed, numeric_mode=mode).forward(ids)
        wanted = mojolearn.SambaInference(model.config, lowbit.unpack(packed)[0], numeric_mode=mode).forward(ids)
        _same(f"packed {fmt}", digest(got), digest(wanted))
        digests.append(digest(got))
    return "".join(digests)


def _check_model_threads(model: Any) -> str:
    results = []
    for count in THREADS:
        with _threads(count):
            results.append(_model_digest(model))
    for count, result in zip(THREADS[1:], results[1:], strict=True):
        _same(f"logits with {count} threads", result, results[0])
    return results[0]


def _load(checkpoint: Path) -> Any:
    return mojolearn.SambaInference.from_checkpoint(checkpoint)


# ---------------------------------------------------------------------------------------------------------------------


def checks_for(checkpoint: Path | None) -> dict[str, tuple[str, Callable[[], str]]]:
    """The checks by name: what each compares, and the function that does it."""
    counts = ", ".join(map(str, THREADS))
    sets = [name for name in _core.BUILT if name in _core.AVAILABLE]
    checks: dict[str, tuple[str, Callable[[], str]]] = {
        "instruction sets": (", ".join(sets), partial(_check_instruction_sets, checkpoint)),
    }
    if checkpoint is not None:
        model = _load(checkpoint)
        checks["threads"] = (f"logits with {counts}", partial(_check_model_threads, model))
        checks["a step is a forward"] = ("steps and splits of a prefill", partial(_check_steps, model))
        checks["rows"] = ("alone, in a batch, padded", partial(_check_rows, model))
        return checks

    checks["shipped training runs"] = ("mode identical, public library's results", _check_shipped_training)
    checks["shipped low-bit codes"] = ("bfloat16 and int8", _check_shipped_lowbit)
    for mode in MODES:
        stack = _new_stack(mode)
        checks |= {
            f"threads, {mode}": (f"training with {counts}", partial(_check_threads, mode)),
            f"micro-batches, {mode}": ("training in 1, 2 and 4 pieces", partial(_check_micro_batches, mode)),
            f"resume, {mode}": (f"{STEPS} steps, stopped after {RESUMED_AT}", partial(_check_resume, mode)),
            f"a step is a forward, {mode}": ("steps and splits of a prefill", partial(_check_steps, stack)),
            f"rows, {mode}": ("alone, in a batch, padded", partial(_check_rows, stack)),
            f"packed weights, {mode}": ("packed against unpacked", partial(_check_packed, stack)),
        }
    checks["floating-point mode"] = ("of the caller, kept", _check_environment)
    return checks


def verify(
    checkpoint: str | os.PathLike[str] | None = None, on_check: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    """Check the promises about bits on this machine.

    Parameters
    ----------
    checkpoint : path-like or None, default None
        Check with this model instead of the shipped and built-in ones.
    on_check : callable or None, default None
        Called with the name of each check when it is done.

    Returns
    -------
    dict
        ``ok``; ``digest``, equal on all machines where all is well; ``checks``, a list of dicts with ``name``, ``ok``
        and ``detail``; ``instruction_set``, ``threads`` and ``version`` of this process.
    """
    _whole_run.cache_clear()
    place = None if checkpoint is None else Path(checkpoint)
    results, total = [], hashlib.sha256()
    for name, (detail, check) in checks_for(place).items():
        try:
            total.update(f"{name} {check()}\n".encode())
            results.append({"name": name, "ok": True, "detail": detail})
        except Failure as failure:
            results.append({"name": name, "ok": False, "detail": str(failure)})
        if on_check is not None:
            on_check(name)
    ok = all(result["ok"] for result in results)
    return {
        "ok": ok,
        "digest": total.hexdigest() if ok else None,
        "checks": results,
        "instruction_set": _core.ISA,
        "threads": mojolearn.get_num_threads(),
        "version": mojolearn.__version__,
    }


if __name__ == "__main__":
    print(_child_digest(Path(sys.argv[1]) if len(sys.argv) > 1 else None))
