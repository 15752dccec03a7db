"""Reported: two OpenMP libraries in one process abort it, or spoil each other's threads."""

import importlib.util
import pathlib
import shutil
import subprocess

import pytest
from report_model import run

from mojolearn import _core

MODULES = sorted(pathlib.Path(_core.__file__).parent.rglob("*.so"))

TRAIN = """
import hashlib, sys
sys.path[:] = [p for p in sys.path if p != ""]
{before}
from report_model import new_stack, tokens
stack = new_stack()
{after}
stack.train_step(tokens(2, 30), tokens(2, 30))
assert sys.float_info.min / 2 != 0
print(hashlib.sha256(stack.flat.tobytes()).hexdigest())
"""


@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_no_openmp_is_linked():
    assert len(MODULES) >= 6
    for module in MODULES:
        text = subprocess.run(["readelf", "-d", module], capture_output=True, text=True, check=True).stdout
        needed = {line.split("[")[1].rstrip("]") for line in text.splitlines() if "NEEDED" in line}
        allowed = ("libc.so", "libm.so", "libpthread.so", "ld-linux", "libasan", "libubsan")
        assert all(name.startswith(allowed) for name in needed), (module, needed)


@pytest.mark.parametrize("name", ["numpy", "scipy.linalg", "torch"])
def test_beside_other_libraries(name):
    if importlib.util.find_spec(name.split(".")[0]) is None:
        pytest.skip(f"{name} is not installed")
    load = f"import warnings\nwith warnings.catch_warnings():\n    warnings.simplefilter('ignore')\n    import {name}"
    alone = run(TRAIN.format(before="", after=""))
    assert run(TRAIN.format(before=load, after="")) == alone
    assert run(TRAIN.format(before="", after=load)) == alone
