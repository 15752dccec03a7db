"""Errors with a name of their own. All of them are ValueErrors, so ``except ValueError`` catches every refusal."""

__all__ = ["CapacityError", "CheckpointError", "NonFiniteError", "RandomStreamError"]


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
