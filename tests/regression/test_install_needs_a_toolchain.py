"""Reported: installing or importing needs a compiler, or another framework."""

from report_model import run


def test_import_needs_no_compiler_and_no_framework():
    program = """
import sys
import mojolearn
from report_model import new_stack, tokens
new_stack().forward(tokens(1, 5))
heavy = {"torch", "Cython", "setuptools", "distutils", "scipy", "matplotlib", "jax", "tensorflow", "triton"}
print(sorted(heavy & set(sys.modules)))
"""
    assert run(program, PATH="", CC="false") == "[]\n"
