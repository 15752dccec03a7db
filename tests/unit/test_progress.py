"""What a progress bar is told while a file is read."""

import pytest

import mojolearn
from mojolearn import checkpoint
from mojolearn._progress import observed_reading
from mojolearn.export import export

CONFIG = mojolearn.SambaConfig(64, 64, ("mamba3", "attention"), n_heads=2, intermediate=64)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    stack = mojolearn.SambaStack(CONFIG, generator=mojolearn.training.Generator(0))
    stack.save_checkpoint(folder / "archive.ckpt")
    stack.save_checkpoint(folder / "plain.samba2", compression=None)
    export(stack, folder / "weights.ckpt", format="int8")
    export(stack, folder / "weights.safetensors", format="float32")
    return folder


def positions(read):
    seen = []
    with observed_reading(seen.append):
        read()
    return seen


READS = {
    "archive.ckpt": [mojolearn.SambaStack.from_checkpoint, mojolearn.SambaInference.from_checkpoint],
    "plain.samba2": [mojolearn.SambaStack.from_checkpoint, mojolearn.SambaInference.from_checkpoint],
    "weights.ckpt": [mojolearn.SambaInference.from_checkpoint],
    "weights.safetensors": [mojolearn.SambaInference.from_safetensors],
}


@pytest.mark.parametrize(("name", "read"), [(name, read) for name, reads in READS.items() for read in reads])
def test_loading_is_observed_to_the_end(name, read, files):
    seen = positions(lambda: read(files / name))
    assert len(seen) > 2
    assert seen == sorted(seen)
    size = (files / name).stat().st_size
    assert 0.9 * size <= seen[-1] <= size
    assert positions(lambda: None) == []


@pytest.mark.parametrize("name", ["archive.ckpt", "plain.samba2", "weights.ckpt"])
def test_checking_is_observed(name, files):
    seen = positions(lambda: checkpoint.inspect(files / name, verify=True))
    assert seen == sorted(seen)
    assert seen[-1] == (files / name).stat().st_size
