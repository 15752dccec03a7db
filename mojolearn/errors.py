"""Errors with a name of their own. A refusal is a ValueError, so ``except ValueError`` catches every one."""

__all__ = [
    "CapacityError",
    "CheckpointError",
    "NonFiniteError",
    "RandomStreamError",
    "RankFailedError",
    "RankMismatchError",
]


class CheckpointError(ValueError):
    """A checkpoint file is damaged, is not a checkpoint, or does not fit what it is loaded into.

    The message names the file and what is wrong with it. Nothing has been changed when it is raised.
    """


class RandomStreamError(ValueError):
    """A `Generator` has handed out its last random stream (there are 2**32)."""


class CapacityError(ValueError):
    """A decode state has no room for the tokens of a call. The state is as it was before the call."""


class NonFiniteError(ValueError):
    """NaN or infinity where a finite value is needed: a weight, a gradient, an activation or a norm."""


class RankMismatchError(ValueError):
    """The ranks of a distributed run do not agree on what they compute. All of them raise it."""


class RankFailedError(RuntimeError):
    """Another rank of a distributed run has failed, or has not answered in time."""
