"""The examples in the docstrings run and print what they say."""

import doctest
import importlib
import pkgutil

import pytest

import mojolearn

MODULES = [
    info.name
    for info in pkgutil.walk_packages(mojolearn.__path__, "mojolearn.")
    if not info.name.startswith(("mojolearn._core", "mojolearn.__main__"))
]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert failed == 0


def test_public_classes_have_examples():
    for public in (mojolearn.SambaConfig, mojolearn.SambaStack, mojolearn.SambaInference):
        assert ">>>" in public.__doc__
