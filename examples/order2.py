"""An order-2 byte model, the yardstick of the demo: how well do counts of three bytes in a row predict text?

Witten-Bell interpolation: the estimate from k bytes of context leans on the one from k - 1 bytes by as much as the
context has shown different followers,

    p_k(c | h) = (count(h c) + kinds(h) p_{k-1}(c | h')) / (count(h) + kinds(h)),    p_{-1} = 1 / 256.
"""

from __future__ import annotations

import numpy as np


class Order2Model:
    """Counts of single bytes, pairs and triples of a text.

    Parameters
    ----------
    text : array of int, shape (n,)
        Bytes to count.
    """

    def __init__(self, text: np.ndarray):
        text = np.asarray(text, dtype=np.int64)
        self.counts = []
        code = np.zeros(text.size, dtype=np.int64)
        for order in range(3):
            # code[i]: text[i] and the `order` bytes before it as one number.
            code = text if order == 0 else (text[: text.size - order] << (8 * order)) + code[1:]
            counts = np.bincount(code, minlength=256 ** (order + 1))
            self.counts.append(counts.reshape(-1, 256))
        self.totals = [counts.sum(axis=1) for counts in self.counts]
        self.kinds = [(counts > 0).sum(axis=1) for counts in self.counts]

    def probability(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """The probability of each of some bytes.

        Parameters
        ----------
        before : array of int, shape (n, 2)
            The two bytes before.
        after : array of int, shape (n,)
        """
        before = np.asarray(before, dtype=np.int64)
        contexts = (np.zeros(len(before), dtype=np.int64), before[:, 1], (before[:, 0] << 8) + before[:, 1])
        probability = np.full(len(before), 1 / 256)
        for context, counts, totals, kinds in zip(contexts, self.counts, self.totals, self.kinds, strict=True):
            seen = totals[context] > 0
            weighted = counts[context, after] + kinds[context] * probability
            np.divide(weighted, totals[context] + kinds[context], out=probability, where=seen)
        return probability

    def bits_per_byte(self, rows: np.ndarray) -> float:
        """Mean code length of the bytes of rows, each row but for its first byte, with the row's own context.

        Parameters
        ----------
        rows : array of int, shape (n, L + 1)
        """
        bits = []
        for row in np.asarray(rows):
            # The second byte of a row has one byte of context only; it is taken twice, which costs little.
            before = np.stack([np.concatenate([row[:1], row[:-2]]), row[:-1]], axis=1)
            bits.append(-np.log2(self.probability(before, row[1:])).mean())
        return float(np.mean(bits))
