"""How much memory a training step needs, and how much there is."""

from __future__ import annotations

from pathlib import Path

from mojolearn.cli._common import bytes_text
from mojolearn.config import SambaConfig
from mojolearn.distributed import divide_rows

FLOAT = 4
INTERPRETER = 80 << 20  # Python, NumPy and the compiled modules
LEAF = 128  # tokens whose gradients are summed before anything is merged
MARGIN = 1.25  # scratch and alignment
LOGITS_LIMIT = 256 << 20  # the head works through tokens in pieces of at most this many bytes


def training_memory(
    config: SambaConfig, batch_size: int, seq_len: int, accumulation_steps: int = 1, ranks: int = 1, n_shards: int = 1
) -> int:
    """An estimate in bytes, on the safe side, of the peak of a training step in one process.

    Parameters
    ----------
    config : SambaConfig
    batch_size, seq_len, accumulation_steps : int
    ranks, n_shards : int, default 1
        Processes that the batch is divided among, and shards of its rows.
    """
    division = divide_rows(batch_size, seq_len, ranks, n_shards)
    rows = max(last - first for first, last in division.rows)
    tokens = -(-rows // accumulation_steps) * seq_len
    # Parameters, two moments and the gradient; micro-batches add the subtrees of a sum that wait for their neighbour.
    buffers = 2 + 2 / ranks
    if accumulation_steps > 1:
        pieces = accumulation_steps if tokens % LEAF == 0 else tokens * accumulation_steps // LEAF
        buffers += pieces.bit_length() + 1
    if n_shards > 1:
        buffers += (-(-n_shards // ranks)).bit_length()
    if ranks > 1:
        # A rank may end with several subtrees, and gets its block of those of all others.
        buffers += max(map(len, division.roots)) - 1 + sum(map(len, division.roots)) / ranks

    kept = 2 * config.d_model  # embedding output and final norm
    widest = 0
    for kind in config.layers:
        width, backward = _block_widths(config, kind)
        kept += width
        widest = max(widest, backward)
    logits = min(FLOAT * tokens * config.vocab, LOGITS_LIMIT)
    activations = MARGIN * FLOAT * tokens * (kept + widest)
    return INTERPRETER + int(buffers * FLOAT * config.num_parameters + activations) + 2 * logits


def _block_widths(config: SambaConfig, kind: str) -> tuple[int, int]:
    """Floats per token that a block keeps for its backward pass, and that the backward pass itself needs."""
    shapes = dict(config.block_shapes(kind))
    d = config.d_model
    if kind == "mamba3":
        projected = shapes["in_proj.weight"][0]
        heads = shapes["dt_bias"][0]
        rows = heads * 128  # a row of q or k for all heads
        return projected + 3 * d + rows, 2 * projected + 6 * rows
    inner = shapes["gate_proj.weight"][0]
    keys = shapes["k_proj.weight"][0]
    return 3 * d + 2 * keys + 2 * inner, 6 * d + 2 * keys + 4 * inner


def available_memory() -> int | None:
    """Bytes that this process may still take, by the system and its control group; None where neither says."""
    limits = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    except OSError:
        pass
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            limits.append(int(Path(limit).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    return max(0, min(limits)) if limits else None


def check_memory(
    config: SambaConfig, batch_size: int, seq_len: int, accumulation_steps: int, ranks: int = 1, n_shards: int = 1
) -> int:
    """The memory that training needs; arguments as `training_memory`.

    Raises
    ------
    MemoryError
        There is less.
    """
    needed = training_memory(config, batch_size, seq_len, accumulation_steps, ranks, n_shards)
    available = available_memory()
    if available is not None and needed > available:
        raise MemoryError(
            f"training needs about {bytes_text(needed)} and {bytes_text(available)} are free; "
            "a smaller batch_size, seq_len or model, or more accumulation_steps need less"
        )
    return needed
