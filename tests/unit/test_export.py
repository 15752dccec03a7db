"""Export: from every kind of source, into both kinds of file, with the errors reported."""

import fnmatch
import hashlib

import numpy as np
import pytest

import mojolearn
from mojolearn import lowbit
from mojolearn.errors import CheckpointError
from mojolearn.export import export
from mojolearn.training import Generator

CONFIG = mojolearn.SambaConfig(vocab=29, d_model=32, layers=("mamba3", "attention"), n_heads=2, intermediate=48)
MATRICES = [name for name, shape in CONFIG.registry() if len(shape) == 2]
SUFFIXES = ("ckpt", "safetensors")


@pytest.fixture
def stack():
    made = mojolearn.SambaStack(CONFIG, generator=Generator(5))
    made.extra = {"note": "kept"}
    return made


def load(path):
    if path.suffix == ".safetensors":
        return mojolearn.SambaInference.from_safetensors(path)
    return mojolearn.SambaInference.from_checkpoint(path)


def logits(model):
    return model.forward(np.arange(14).reshape(2, 7)).tobytes()


def expected_weights(stack, fmt, keep=()):
    weights = stack.parameters()
    packed = lowbit.pack(weights, fmt)
    return {
        name: weights[name] if any(fnmatch.fnmatch(name, one) for one in keep) else packed[name] for name in weights
    }


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("fmt", lowbit.FORMATS)
def test_every_source_gives_the_same_file(stack, tmp_path, fmt, suffix):
    keep = ["layers.0.?_bias", "embed.weight"]
    stack.save_checkpoint(tmp_path / "zstd.ckpt")
    plain = mojolearn.SambaStack(CONFIG, stack.parameters())
    plain.save_checkpoint(tmp_path / "plain.ckpt", compression=None)
    export(stack, tmp_path / "float.safetensors", format="float32")
    out = tmp_path / f"out.{suffix}"
    digests = set()
    for source in (stack, tmp_path / "zstd.ckpt", str(tmp_path / "float.safetensors")):
        report = export(source, out, format=fmt, keep=keep)
        assert report["sha256"] == hashlib.sha256(out.read_bytes()).hexdigest()
        digests.add(report["sha256"])
        model = load(out)
        assert model.weight_format == fmt
        expected = mojolearn.SambaInference(CONFIG, expected_weights(stack, fmt, keep))
        assert logits(model) == logits(expected)
        assert export(model, tmp_path / f"again.{suffix}", format=fmt, keep=keep)["relative_error"] == 0
        assert logits(load(tmp_path / f"again.{suffix}")) == logits(expected)
    assert len(digests) == 1
    # The plain layout carries no extra facts, so that this file is another.
    export(tmp_path / "plain.ckpt", out, format=fmt, keep=keep)
    assert logits(load(out)) == logits(expected)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_report(stack, tmp_path, suffix):
    out, seen = tmp_path / f"out.{suffix}", []
    report = export(stack, out, keep=["layers.1.*"], progress=seen.append)
    weights = stack.parameters()
    packed = expected_weights(stack, "int8", ["layers.1.*"])
    assert report["out"] == str(out)
    assert report["format"] == "int8"
    assert report["file_size"] == out.stat().st_size
    assert report["config"] == CONFIG.to_dict()
    assert [entry["name"] for entry in report["tensors"]] == [name for name, _ in CONFIG.registry()]
    all_squares = all_errors = 0
    for entry in report["tensors"]:
        value = weights[entry["name"]].astype(np.float64)
        error = value - lowbit.materialize_one(packed[entry["name"]])
        assert entry["shape"] == list(value.shape)
        assert entry["format"] == getattr(packed[entry["name"]], "format", "float32")
        assert entry["nbytes"] == packed[entry["name"]].nbytes
        np.testing.assert_allclose(entry["rms"], np.sqrt(np.mean(value**2)), rtol=1e-12)
        np.testing.assert_allclose(entry["rms_error"], np.sqrt(np.mean(error**2)), rtol=1e-12)
        np.testing.assert_allclose(entry["max_error"], np.abs(error).max(), rtol=1e-12)
        np.testing.assert_allclose(entry["relative_error"] * entry["rms"], entry["rms_error"], rtol=1e-12)
        all_squares, all_errors = all_squares + (value**2).sum(), all_errors + (error**2).sum()
    np.testing.assert_allclose(report["relative_error"], np.sqrt(all_errors / all_squares), rtol=1e-12)
    assert report["float32_bytes"] == 4 * CONFIG.num_parameters == seen[-1]
    assert report["weight_bytes"] == sum(entry["nbytes"] for entry in report["tensors"])
    assert seen == sorted(seen)


def test_extra_facts_travel_on(stack, tmp_path):
    stack.save_checkpoint(tmp_path / "source.ckpt", extra={"tokenizer": "bytes é"})
    export(tmp_path / "source.ckpt", tmp_path / "one.safetensors")
    export(tmp_path / "one.safetensors", tmp_path / "two.ckpt")
    from mojolearn.checkpoint import WeightsReader

    with WeightsReader(tmp_path / "two.ckpt") as reader:
        assert reader.extra == {"tokenizer": "bytes é"}


def test_nothing_to_pack_makes_a_float32_file(stack, tmp_path):
    report = export(stack, tmp_path / "out.ckpt", format="int8", keep=["*"])
    assert report["format"] == "float32"
    assert report["relative_error"] == 0
    assert load(tmp_path / "out.ckpt").weight_format == "float32"


def test_one_packed_format_into_another(stack, tmp_path):
    """int8 codes have at most seven bits: bfloat16 holds their values exactly."""
    export(stack, tmp_path / "int8.ckpt", format="int8")
    report = export(tmp_path / "int8.ckpt", tmp_path / "half.ckpt", format="bfloat16")
    assert report["relative_error"] == 0
    assert logits(load(tmp_path / "half.ckpt")) == logits(load(tmp_path / "int8.ckpt"))
    export(tmp_path / "int8.ckpt", tmp_path / "float.ckpt", format="float32")
    assert logits(load(tmp_path / "float.ckpt")) == logits(load(tmp_path / "int8.ckpt"))


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("value", (np.nan, np.inf))
def test_weights_that_are_not_finite_are_refused(stack, tmp_path, value, suffix):
    out = tmp_path / f"out.{suffix}"
    out.write_bytes(b"old")
    stack.parameters()["layers.0.out_proj.weight"][3, 4] = value
    with pytest.raises(ValueError, match=r"layers\.0\.out_proj\.weight must be finite, got (nan|inf) at \(3, 4\)"):
        export(stack, out)
    assert out.read_bytes() == b"old"


def test_weights_that_would_become_infinite_are_refused(stack, tmp_path):
    stack.parameters()["embed.weight"][0, 1] = 3.4e38
    with pytest.raises(ValueError, match="bfloat16: keep it in float32"):
        export(stack, tmp_path / "out.ckpt", format="bfloat16")
    export(stack, tmp_path / "out.ckpt", format="bfloat16", keep=["embed.weight"])
    export(stack, tmp_path / "out.ckpt", format="int8")


def test_rows_of_zeros_and_of_tiny_values(stack, tmp_path):
    matrix = stack.parameters()["layers.0.out_proj.weight"]
    matrix[0] = 0
    matrix[1] = 1e-40
    matrix[2] = 2.0**-126
    report = export(stack, tmp_path / "out.ckpt", format="int8")
    found = load(tmp_path / "out.ckpt").parameters()["layers.0.out_proj.weight"]
    assert not found[:3].any()
    entry = next(one for one in report["tensors"] if one["name"] == "layers.0.out_proj.weight")
    assert entry["max_error"] < np.abs(matrix).max() / 64


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"format": "int4"}, ValueError, "int4"),
        ({"keep": "embed.weight"}, TypeError, "keep must be a sequence"),
        ({"keep": [3]}, TypeError, "keep must hold"),
        ({"keep": ["embed.wieght"]}, ValueError, r"'embed\.wieght' fits none"),
    ],
)
def test_refusals(stack, tmp_path, options, error, match):
    with pytest.raises(error, match=match):
        export(stack, tmp_path / "out.ckpt", **options)
    assert not list(tmp_path.iterdir())


def test_sources_that_are_none(stack, tmp_path):
    with pytest.raises(TypeError, match="source must be"):
        export(3, tmp_path / "out.ckpt")
    with pytest.raises(FileNotFoundError):
        export(tmp_path / "none.ckpt", tmp_path / "out.ckpt")
    (tmp_path / "junk.ckpt").write_bytes(b"junk")
    with pytest.raises(CheckpointError):
        export(tmp_path / "junk.ckpt", tmp_path / "out.ckpt")
    with pytest.raises(OSError, match="folder"):
        export(stack, tmp_path / "no folder" / "out.ckpt")
