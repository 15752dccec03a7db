"""Keep Ctrl-C out of the few instructions that must not be cut in half."""

import contextlib
import signal
import threading

__all__ = ["deferred_interrupts"]


@contextlib.contextmanager
def deferred_interrupts():
    """Hold back SIGINT inside the block and deliver it after.

    Signal handlers run in the main thread only, so elsewhere there is nothing to hold back.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGINT)
    if handler is None or handler in (signal.SIG_IGN, signal.SIG_DFL):
        # Ignored, owned by foreign code, or fatal to the process: a half-done commit is not seen by anyone.
        yield
        return
    pending = []
    signal.signal(signal.SIGINT, lambda number, frame: pending.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if pending:
            handler(*pending[0])
