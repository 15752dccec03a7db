"""Fixtures that several test modules use."""

import pathlib
import signal

import pytest

import mojolearn

# A job in the background of a shell ignores Ctrl-C, and so would the processes that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

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
