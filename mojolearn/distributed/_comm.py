"""What ranks can do with one another: send and receive; gather and broadcast are made of these."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Comm", "Request", "Traffic"]


@dataclass
class Traffic:
    """Messages and bytes that a rank has sent, arrays and control messages apart.

    Attributes
    ----------
    array_messages, array_bytes : int
        Gradients, cotangents, parameters and moments.
    control_messages, control_bytes : int
        Everything else: agreements, losses, sums of squares.
    """

    array_messages: int = 0
    array_bytes: int = 0
    control_messages: int = 0
    control_bytes: int = 0


class Request(ABC):
    """A message on its way."""

    @abstractmethod
    def wait(self) -> None:
        """Return when the message has been received, or when the memory it is sent from may be written again."""


class Comm(ABC):
    """A group of ranks, seen from one of them.

    All ranks make the same calls in the same order. No arithmetic is done here: the order of a sum would depend on the
    number of ranks.

    Attributes
    ----------
    rank : int
        This rank, from 0.
    size : int
        Number of ranks.
    timeout : float
        Seconds to wait for a message before its sender is taken for lost.
    traffic : Traffic
        What this rank has sent so far.
    """

    def __init__(self, rank: int, size: int, timeout: float):
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.traffic = Traffic()

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: rank {self.rank} of {self.size}>"

    def send(self, array: np.ndarray, dest: int) -> Request:
        """Start to send a contiguous array, which must stay as it is until the request has been waited for."""
        self.traffic.array_messages += 1
        self.traffic.array_bytes += array.nbytes
        return self._send(array, dest)

    def receive(self, out: np.ndarray, source: int) -> Request:
        """Start to receive an array of this size; it lies in `out` when the request has been waited for."""
        return self._receive(out, source)

    def gather(self, value: Any) -> list[Any] | None:
        """The values of all ranks in rank order, on rank 0; None on the others.

        They travel up a binomial tree, so rank 0 gets log2(size) messages.
        """
        values = {self.rank: value}
        step = 1
        while step < self.size:
            if self.rank & step:
                self._send_value(values, self.rank - step)
                return None
            if self.rank + step < self.size:
                values.update(self._receive_value(self.rank + step))
            step *= 2
        return [values[rank] for rank in range(self.size)]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's value, on all ranks; it travels down the same tree."""
        step = 1
        while step < self.size and not self.rank & step:
            step *= 2
        if self.rank:
            value = self._receive_value(self.rank - step)
        step //= 2
        while step:
            if self.rank + step < self.size:
                self._send_value(value, self.rank + step)
            step //= 2
        return value

    def _send_value(self, value: Any, dest: int) -> None:
        content = pickle.dumps(value, protocol=5)
        self.traffic.control_messages += 1
        self.traffic.control_bytes += len(content)
        self._send_bytes(content, dest)

    def _receive_value(self, source: int) -> Any:
        return pickle.loads(self._receive_bytes(source))

    @abstractmethod
    def _send(self, array: np.ndarray, dest: int) -> Request: ...

    @abstractmethod
    def _receive(self, out: np.ndarray, source: int) -> Request: ...

    @abstractmethod
    def _send_bytes(self, content: bytes, dest: int) -> None: ...

    @abstractmethod
    def _receive_bytes(self, source: int) -> bytes: ...

    @abstractmethod
    def abort(self, message: str) -> None:
        """End the job of all ranks because this one has failed."""
