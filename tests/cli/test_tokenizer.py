"""Training and generating through a Hugging Face tokenizer file."""

import json

import numpy as np
import pytest
from cli_process import SMALL

import mojolearn
from mojolearn.cli._tokenizer import TokenizerText

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(scope="module")
def tokenizer_file(text, tmp_path_factory):
    """A byte-level BPE of 300 tokens, trained on the text."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train([str(path) for path in sorted(text.iterdir())], trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_the_tokenizer_travels_with_the_checkpoint(tokenizer_file, text, tmp_path, run):
    folder = tmp_path / "run"
    options = [*SMALL, "--steps", 6, "--eval-every", 6, "--tokenizer", tokenizer_file]
    status, out, _ = run("train", text, "--out", folder, *options, "--json")
    assert status == 0
    result = json.loads(out)

    tokenizer = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    contents = {path.name: path.read_text() for path in text.iterdir()}
    ids = [tokenizer.encode(contents[name]).ids for name in ("a.txt", "b.txt")]
    tokens = np.load(folder / "tokens.npy")
    assert tokens.dtype == np.uint16
    assert tokens.tolist() in (ids[0] + ids[1], ids[1] + ids[0])
    per_token = sum(map(len, contents.values())) / tokens.size
    assert result["valid_bits_per_byte"] == pytest.approx(result["valid_loss"] / np.log(2) / per_token)

    moved = tmp_path / "alone.ckpt"
    (folder / "best.ckpt").rename(moved)
    status, out, _ = run("generate", moved, "--prompt", "1 plus", "--max-new-tokens", 9, "--json", "--seed", 3)
    assert status == 0
    row = json.loads(out)
    model = mojolearn.SambaInference.from_checkpoint(moved)
    prompt = tokenizer.encode("1 plus").ids
    assert row["tokens"] == list(mojolearn.generate(model, prompt, 9, 0.8, seed=3))
    assert row["text"] == tokenizer.decode(prompt + row["tokens"])[len("1 plus") :]

    status, out, _ = run("eval", moved, text, "--json")
    assert status == 0
    assert json.loads(out)["bits_per_byte"] == pytest.approx(json.loads(out)["loss"] / np.log(2) / per_token)


def test_a_resumed_run_keeps_its_tokens(tokenizer_file, text, tmp_path, run):
    options = [*SMALL, "--steps", 6, "--eval-every", 3, "--save-every", 3, "--tokenizer", tokenizer_file]
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run("train", text, "--out", whole, *options)[0] == 0
    assert run("train", text, "--out", broken, *options, "--stop-after", 2)[0] == 0
    assert run("train", "--out", broken, "--resume")[0] == 0
    assert (broken / "step-00000006.ckpt").read_bytes() == (whole / "step-00000006.ckpt").read_bytes()


def test_text_comes_out_as_its_characters_are_complete(tokenizer_file):
    coder = TokenizerText(tokenizer_file.read_text())
    written = "7 plus 9 – né\U0001f642 makes 16."
    ids = coder.encode(written)
    decode = coder.decoder()
    pieces = [decode(id, i == len(ids) - 1) for i, id in enumerate(ids)]
    assert "".join(pieces) == written
    assert not any("�" in piece for piece in pieces)


def test_a_file_that_is_no_tokenizer_is_said(text, tmp_path, run):
    (tmp_path / "tokenizer.json").write_text("{}")
    status, _, err = run("train", text, "--out", tmp_path / "run", "--tokenizer", tmp_path / "tokenizer.json")
    assert status == 1
    assert "a tokenizer.json is wanted" in err
