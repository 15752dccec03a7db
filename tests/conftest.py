"""Fixtures that several test modules use."""

import pathlib

import pytest

import mojolearn

TESTS = pathlib.Path(__file__).resolve().parent


@pytest.fixture(scope="session")
def golden():
    """Folder of committed results of the public library; never regenerated."""
    return TESTS / "golden"


@pytest.fixture(params=(1, 2, 3, 8))
def threads(request):
    """Thread counts, more than this machine's cores included; the default is restored after."""
    before = mojolearn.get_num_threads()
    mojolearn.set_num_threads(request.param)
    yield request.param
    mojolearn.set_num_threads(before)
