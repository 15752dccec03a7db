"""Reported: a module built with one NumPy fails with another, as the size of an array object has changed.

The compiled modules take arrays through the buffer protocol alone and know nothing of NumPy's structures.
"""

import pathlib

from mojolearn import _core

FOLDER = pathlib.Path(_core.__file__).parent


def test_no_module_uses_the_interface_of_numpy():
    modules = sorted(FOLDER.rglob("*.so"))
    assert len(modules) >= 6
    for module in modules:
        content = module.read_bytes()
        assert b"_ARRAY_API" not in content, module
        assert b"multiarray" not in content, module
