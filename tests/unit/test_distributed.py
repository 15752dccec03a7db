"""Training divided among ranks, with ranks that are threads: the bits of one process, refusals, failures, costs."""

import ast
import dataclasses
import functools
import json
import pathlib
import pickle
import re
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mojolearn
from mojolearn import distributed
from mojolearn._gradients import SubtreeCounter, leaf_size
from mojolearn.config import SambaConfig
from mojolearn.distributed import LocalComm, ParameterBlocks, divide_rows, require_agreement, run_ranks, step_costs
from mojolearn.errors import CheckpointError, NonFiniteError, RankFailedError, RankMismatchError
from mojolearn.stack import SambaStack
from mojolearn.training import Generator, WarmupCosineLR

HYBRID = SambaConfig(
    61, 32, ("mamba3", "attention"), n_heads=4, n_kv_heads=2, intermediate=48, dropout=0.2, tie_embeddings=True
)
UNTIED = SambaConfig.from_dict({**HYBRID.to_dict(), "tie_embeddings": False})
ROWS, LENGTH = 8, 64
TOGETHER = {"identical": 1, "deterministic": 5}  # shards of each mode


@pytest.fixture(autouse=True)
def one_thread():
    """The ranks are threads already."""
    before = mojolearn.get_num_threads()
    mojolearn.set_num_threads(1)
    yield
    mojolearn.set_num_threads(before)


def batch(seed, rows=ROWS, length=LENGTH, vocab=61):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (rows, length + 1)).astype(np.int32)
    targets = ids[:, 1:].copy()
    targets[rng.random(targets.shape) < 0.1] = -100
    return ids[:, :-1], targets


def new_stack(comm=None, mode="identical", config=HYBRID, n_shards=None, **options):
    options = {"max_norm": 0.3, "lr_schedule": WarmupCosineLR(0.01, 2, 10), **options}
    n_shards = TOGETHER.get(mode, 1) if n_shards is None else n_shards
    return SambaStack(config, generator=Generator(3), numeric_mode=mode, comm=comm, n_shards=n_shards, **options)


def train(stack, first, last, **shape):
    return [stack.train_step(*batch(step, **shape)) for step in range(first, last)]


def assert_same_state(got, want):
    for name in ("parameters", "exp_avg", "exp_avg_sq"):
        assert got[name].tobytes() == want[name].tobytes(), name
    assert {k: v for k, v in got.items() if not isinstance(v, np.ndarray)} == {
        k: v for k, v in want.items() if not isinstance(v, np.ndarray)
    }


@functools.cache
def alone(mode, tied):
    stack = new_stack(mode=mode, config=HYBRID if tied else UNTIED)
    return train(stack, 0, 4), stack.state_dict()


# ---- the bits of one process -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("mode", ["identical", "deterministic"])
def test_any_number_of_ranks_gives_the_bits_of_one_process(mode, ranks, tied):
    """A hybrid with dropout, clipping, ignored targets, and micro-batches on the ranks."""

    def run(comm):
        stack = new_stack(comm, mode, HYBRID if tied else UNTIED, accumulation_steps=2 if ranks < 3 else 1)
        log = train(stack, 0, 4)
        return log, stack.state_dict(), stack.flat.copy()

    results = run_ranks(ranks, run)
    log, state = alone(mode, tied)
    for rank, (got_log, got_state, flat) in enumerate(results):
        assert got_log == log
        assert flat.tobytes() == state["parameters"].tobytes()
        if rank:
            assert got_state is None
    got = results[0][1]
    got["optimizer"]["accumulation_steps"] = 1
    assert_same_state(got, state)


@pytest.mark.parametrize("name", ["train_dropout", "train_hybrid", "train_long", "train_readme"])
def test_results_of_the_public_library(golden, name):
    with np.load(golden / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    config = SambaConfig.from_dict(json.loads(str(arrays["config"])))
    options = json.loads(str(arrays["stack_kw"]))
    if str(arrays["schedule"]):
        kind, fields = ast.literal_eval(str(arrays["schedule"]))
        options["lr_schedule"] = getattr(mojolearn.training, kind)(**fields)
    _, rows, length = arrays["x"].shape
    ranks = max(count for count in range(1, 5) if fits(rows, length, count))

    def run(comm):
        stack = SambaStack(
            config, generator=Generator(int(arrays["gen_seed"])), numeric_mode="identical", comm=comm, **options
        )
        log = [stack.train_step(x, y) for x, y in zip(arrays["x"], arrays["y"])]
        return log, stack.state_dict()

    log, state = run_ranks(ranks, run)[0]
    for out, want in zip(log, arrays["log"]):
        norm = -1.0 if out["total_norm"] is None else out["total_norm"]
        assert [out["loss"], out["lr"], out["step"], norm] == want.tolist()
    final = np.concatenate([arrays[f"final.{key}"].reshape(-1) for key, _ in config.registry()])
    assert state["parameters"].tobytes() == final.tobytes()
    assert state["exp_avg"].tobytes() == arrays["exp_avg"].tobytes()
    assert state["exp_avg_sq"].tobytes() == arrays["exp_avg_sq"].tobytes()


def fits(rows, length, ranks):
    try:
        divide_rows(rows, length, ranks)
    except ValueError:
        return False
    return True


def test_rows_of_uneven_leaves():
    """Rows that are no whole leaves, so that ranks get 3 and 2 groups of rows and the last leaf is short."""
    shape = {"rows": 19, "length": 32}  # leaves of 4 rows
    want = new_stack()
    log = train(want, 0, 2, **shape)

    def run(comm):
        stack = new_stack(comm)
        return train(stack, 0, 2, **shape), stack.state_dict()

    for ranks in (2, 3, 5):
        got_log, state = run_ranks(ranks, run)[0]
        assert got_log == log
        assert_same_state(state, want.state_dict())


def test_gradient_of_shards_is_the_tree_of_their_gradients():
    """Against NumPy: five shards of eight rows, each alone, then pairs; the fifth moves up."""
    stack = new_stack(mode="deterministic")
    inputs, targets = batch(7)
    count = int((targets != -100).sum())
    loss, got = stack.loss_and_grads(inputs, targets, dropout_stream=3)
    one = new_stack(mode="deterministic", n_shards=1)
    parts = []
    for shard in range(5):
        first, last = shard * ROWS // 5, (shard + 1) * ROWS // 5
        _, grads = one.loss_and_grads(inputs[first:last], targets[first:last], count, 3, first * LENGTH)
        parts.append(np.concatenate([grad.reshape(-1) for grad in grads]))
    with np.errstate(under="ignore"):
        want = ((parts[0] + parts[1]) + (parts[2] + parts[3])) + parts[4]
    want[np.abs(want) < np.finfo(np.float32).tiny] = 0.0
    assert np.array_equal(np.concatenate([grad.reshape(-1) for grad in got]), want)
    assert loss == pytest.approx(one.loss_and_grads(inputs, targets, dropout_stream=3)[0], rel=1e-6)


def test_fast_mode_divides_any_rows():
    want = new_stack(mode="fast", config=UNTIED)
    train(want, 0, 2, rows=5, length=7)

    def run(comm):
        stack = new_stack(comm, "fast", UNTIED)
        train(stack, 0, 2, rows=5, length=7)
        return stack.flat

    flats = run_ranks(3, run)
    for flat in flats:
        np.testing.assert_allclose(flat, want.flat, rtol=0, atol=2e-4)
        assert flat.tobytes() == flats[0].tobytes()


# ---- checkpoints -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["identical", "deterministic"])
def test_a_checkpoint_of_any_ranks_resumes_with_any_other(mode, tmp_path):
    log, state = alone(mode, True)
    path = tmp_path / "four.ckpt"

    def begin(comm):
        stack = new_stack(comm, mode)
        train(stack, 0, 2)
        return stack.save_checkpoint(path, extra={"at": 2})

    digests = run_ranks(4, begin)
    assert len(set(digests)) == 1
    one = new_stack(mode=mode)
    train(one, 0, 2)
    assert one.save_checkpoint(tmp_path / "one.ckpt", extra={"at": 2}) == digests[0]

    def resume(comm):
        stack = SambaStack.from_checkpoint(path, comm=comm)
        assert stack.extra == {"at": 2} and stack.n_shards == TOGETHER[mode]
        return train(stack, 2, 4), stack.state_dict()

    for ranks in (1, 2, 3):
        got_log, got = run_ranks(ranks, resume)[0]
        assert got_log == log[2:]
        assert_same_state(got, state)
    assert resume(None)[0] == log[2:]


def test_states_move_between_ranks_in_memory():
    log, state = alone("identical", True)
    half = new_stack()
    train(half, 0, 2)

    def run(comm):
        stack = new_stack(comm)
        stack.load_state_dict(half.state_dict())
        return train(stack, 2, 4), stack.state_dict()

    got_log, got = run_ranks(3, run)[0]
    assert got_log == log[2:]
    assert_same_state(got, state)


def test_shards_belong_to_the_state(tmp_path):
    stack = new_stack(mode="deterministic")
    assert stack.state_dict()["deterministic_profile"]["n_shards"] == 5
    with pytest.raises(ValueError, match="n_shards must be 4, got 5"):
        new_stack(mode="deterministic", n_shards=4).load_state_dict(stack.state_dict())
    path = tmp_path / "five.ckpt"
    stack.save_checkpoint(path)
    assert SambaStack.from_checkpoint(path).n_shards == 5
    assert SambaStack.from_checkpoint(path, numeric_mode="identical").n_shards == 1
    broken = {**stack.state_dict(), "deterministic_profile": {"name": "mojolearn.deterministic.v1", "n_shards": 0}}
    with pytest.raises(ValueError, match="n_shards must be at least 1"):
        stack.load_state_dict(broken)


def test_a_file_that_cannot_be_written_is_an_error_on_all_ranks(tmp_path):
    def run(comm):
        stack = new_stack(comm)
        with pytest.raises((ValueError, OSError), match="missing"):
            stack.save_checkpoint(tmp_path / "missing" / "x.ckpt")
        return stack.train_step(*batch(0))["step"]

    assert run_ranks(2, run) == [1, 1]
    with pytest.raises(CheckpointError):
        (tmp_path / "no.ckpt").write_bytes(b"nothing")
        run_ranks(2, lambda comm: SambaStack.from_checkpoint(tmp_path / "no.ckpt", comm=comm))


def test_each_rank_holds_its_own_moments():
    def run(comm):
        return new_stack(comm).optimizer.exp_avg.size

    sizes = run_ranks(4, run)
    total = HYBRID.num_parameters
    assert sum(sizes) == total and max(sizes) < 0.3 * total


def test_a_rank_cannot_be_copied():
    def run(comm):
        stack = new_stack(comm)
        with pytest.raises(TypeError, match="cannot be copied"):
            pickle.dumps(stack)

    run_ranks(2, run)


# ---- refusals and failures ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rows, length, ranks, n_shards, message",
    [
        (4, 31, 2, 1, "4 rows of 31 tokens cannot be divided among 2 ranks in whole leaves of 124 tokens"),
        (4, 128, 5, 1, "up to 4 ranks; batches of 5, 10, 15 rows"),
        (
            2,
            100,
            2,
            1,
            r"1 rank; batches of 64, 128, 192 rows; rows of 128, 256, 384 tokens; .* n_shards from 2 up to 2",
        ),
        (8, 64, 4, 3, "n_shards must be at least the number of ranks, got 3 for 4 ranks"),
    ],
)
def test_rows_that_cannot_be_divided_are_refused_with_what_works(rows, length, ranks, n_shards, message):
    with pytest.raises(ValueError, match=message) as refusal:
        divide_rows(rows, length, ranks, n_shards)
    text = str(refusal.value)
    for numbers, shape in re.findall(r"(batches|rows) of ([\d, ]+) ", text.partition(";")[2]):
        for number in map(int, shape.split(", ")):
            assert fits(number, length, ranks) if numbers == "batches" else fits(rows, number, ranks)


def test_a_refused_division_changes_nothing():
    def run(comm):
        stack = new_stack(comm)
        before = stack.flat.copy(), stack.generator.counter
        with pytest.raises(ValueError, match="cannot be divided among 2 ranks"):
            stack.train_step(*batch(0, rows=3, length=31))
        assert before[0].tobytes() == stack.flat.tobytes() and before[1] == stack.generator.counter
        return stack.train_step(*batch(0))

    assert run_ranks(2, run)[1] == alone("identical", True)[0][0]


@pytest.mark.parametrize("max_norm", [None, 0.3])
def test_what_one_rank_refuses_all_refuse(max_norm):
    """A moment of rank 1 is not finite: nothing changes on rank 0 either."""

    def run(comm):
        stack = new_stack(comm, max_norm=max_norm)
        train(stack, 0, 1)
        if comm.rank == 1:
            kept = stack.optimizer.exp_avg[0]
            stack.optimizer.exp_avg[0] = np.nan
        before = stack.flat.copy(), stack.optimizer.t, stack.generator.counter
        with pytest.raises(NonFiniteError, match="rank 1: exp_avg must be finite"):
            stack.train_step(*batch(1))
        assert before[0].tobytes() == stack.flat.tobytes()
        assert before[1:] == (stack.optimizer.t, stack.generator.counter)
        if comm.rank == 1:
            stack.optimizer.exp_avg[0] = kept
        return stack.train_step(*batch(1))

    one, other = run_ranks(2, run)
    assert one == other and one["step"] == 2


def test_an_activation_that_is_not_finite_is_refused_on_all_ranks():
    def run(comm):
        stack = new_stack(comm)
        inputs, targets = batch(0, vocab=60)
        inputs = inputs.copy()
        inputs[-1, 0] = 60  # on the last rank only
        stack.parameters()["embed.weight"][60] = 3e38
        with pytest.raises(NonFiniteError, match="rank 2: "):
            stack.train_step(inputs, targets)
        return stack.optimizer.t

    assert run_ranks(3, run) == [0, 0, 0]


@pytest.mark.parametrize(
    "differ, what",
    [
        (lambda stack: stack.flat.__setitem__(5, 1.0), "weights"),
        (lambda stack: setattr(stack.optimizer, "lr", 0.5), "optimizer"),
        (lambda stack: setattr(stack, "max_norm", 2.0), "optimizer"),
        (lambda stack: stack.generator.next_stream(), "random stream"),
        (lambda stack: setattr(stack, "accumulation_steps", 2), "accumulation_steps"),
    ],
)
def test_ranks_that_disagree_are_found_at_the_start(differ, what):
    def run(comm):
        stack = new_stack(comm)
        if comm.rank == 2:
            differ(stack)
        with pytest.raises(RankMismatchError, match=f"the same {what}, got .* on rank 2 and"):
            stack.train_step(*batch(0))

    run_ranks(3, run)


def test_versions_modes_and_configurations_are_compared(monkeypatch):
    def run(comm):
        stack = new_stack(comm, mode="deterministic" if comm.rank else "identical")
        with pytest.raises(RankMismatchError, match="numeric_mode"):
            stack.check_ranks()
        stack = new_stack(comm, config=UNTIED if comm.rank else HYBRID)
        with pytest.raises(RankMismatchError, match="config"):
            stack.check_ranks()
        with pytest.raises(RankMismatchError, match=r"data digest, got 'b' .* on rank 1 and 'a'"):
            require_agreement(comm, {"data digest": "ab"[comm.rank]})
        new_stack(comm).check_ranks()

    run_ranks(2, run)
    new_stack().check_ranks()


def test_another_batch_on_one_rank_is_found():
    def run(comm):
        stack = new_stack(comm)
        with pytest.raises(RankMismatchError, match="the same batch, got another one on rank 1"):
            stack.train_step(*batch(comm.rank))
        rows = 4 if comm.rank else 8
        with pytest.raises(RankMismatchError, match="the same batch, got another one on rank 1"):
            stack.train_step(*(part.reshape(rows, -1) for part in batch(0)))

    run_ranks(2, run)


def test_loaded_weights_are_compared_again():
    def run(comm):
        stack = new_stack(comm)
        train(stack, 0, 1)
        weights = {name: value.copy() for name, value in stack.parameters().items()}
        weights["norm_f.weight"][0] += comm.rank
        stack.load_weights(weights)
        with pytest.raises(RankMismatchError, match="weights"):
            stack.train_step(*batch(1))

    run_ranks(2, run)


def test_a_rank_that_fails_ends_the_others():
    def run(comm):
        stack = new_stack(comm)
        train(stack, 0, 1)
        if comm.rank == 1:
            raise KeyError("lost")
        with pytest.raises(RankFailedError, match="rank 1 has failed: KeyError"):
            stack.train_step(*batch(1))

    with pytest.raises(KeyError, match="lost"):
        run_ranks(3, run)


def test_a_rank_that_is_silent_is_given_up():
    def run(comm):
        if comm.rank == 0:
            with pytest.raises(RankFailedError, match=r"rank 1 has sent nothing for 0\.2 s"):
                comm.gather(1)

    started = time.monotonic()
    run_ranks(2, run, timeout=0.2)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"comm": 3}, TypeError, "comm must be a LocalComm, an MPIComm or None"),
        ({"n_shards": 0}, ValueError, "n_shards must be at least 1"),
        ({"n_shards": 2}, ValueError, 'n_shards must be 1 unless numeric_mode is "deterministic", got 2'),
        ({"n_shards": 1.5}, TypeError, "n_shards"),
    ],
)
def test_bad_arguments(options, error, message):
    with pytest.raises(error, match=message):
        SambaStack(HYBRID, generator=Generator(0), numeric_mode="identical", **options)


def test_rows_fewer_than_shards_are_refused():
    stack = new_stack(mode="deterministic")
    for call in (stack.train_step, stack.loss_and_grads):
        with pytest.raises(ValueError, match="a row for each of the 5 shards, got 4 rows"):
            call(*batch(0, rows=4))


def test_a_group_is_made_whole():
    with pytest.raises(ValueError, match=r"LocalComm\.group"):
        LocalComm(0, 2)
    assert [repr(comm) for comm in LocalComm.group(2)] == [
        "<LocalComm: rank 0 of 2>",
        "<LocalComm: rank 1 of 2>",
    ]
    alone = LocalComm(0, 1)
    assert alone.gather(5) == [5] and alone.broadcast(6) == 6


def test_without_mpi4py_the_message_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r"pip install 'mojolearn\[mpi\]'"):
        distributed.MPIComm()


@pytest.mark.parametrize(
    "environment, want",
    [
        ({}, (0, 1, 1)),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, (2, 4, 2)),
        ({"PMI_SIZE": "8", "PMI_RANK": "7"}, (7, 8, 8)),
        ({"PMI_SIZE": "?"}, (0, 1, 1)),
    ],
)
def test_launchers(monkeypatch, environment, want):
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert distributed.launched_ranks() == want


# ---- plans -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 11])
def test_gather_and_broadcast(size):
    def run(comm):
        gathered = comm.gather(comm.rank**2)
        return gathered, comm.broadcast("root" if comm.rank == 0 else None), comm.traffic.control_messages

    results = run_ranks(size, run)
    assert results[0][0] == [rank**2 for rank in range(size)]
    assert all(result[0] is None for result in results[1:])
    assert {result[1] for result in results} == {"root"}
    # Each but the root sends one up; each but the root is sent one down, at most log2 of them by one rank.
    assert sum(result[2] for result in results) == 2 * (size - 1)
    assert max(result[2] for result in results) <= (size - 1).bit_length() + 1


def tree(first, last, leaves):
    """Leaves of the pair tree's nodes, written out: {(first, last)} of every subtree of a tree of `leaves`."""
    level = [(i, i + 1) for i in range(leaves)]
    nodes = set(level)
    while len(level) > 1:
        pairs = [level[i : i + 2] for i in range(0, len(level), 2)]
        level = [(pair[0][0], pair[-1][1]) for pair in pairs]
        nodes |= set(level)
    return {node for node in nodes if first <= node[0] and node[1] <= last}


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.integers(1, 40), st.data())
def test_roots_are_the_largest_subtrees_of_a_range(leaves, data):
    first = data.draw(st.integers(0, leaves - 1))
    last = data.draw(st.integers(first + 1, leaves))
    counter = SubtreeCounter(leaves)
    for leaf in range(first, last):
        counter.push(leaf, leaf + 1)
    inside = tree(first, last, leaves)
    largest = {a for a in inside if not any(b[0] <= a[0] and a[1] <= b[1] and a != b for b in inside)}
    assert counter.blocks == sorted(largest)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(1, 300), st.integers(1, 200), st.integers(1, 9))
def test_divisions_are_whole_leaves(rows, length, ranks):
    if not fits(rows, length, ranks):
        assert -(-rows * length // leaf_size(rows * length)) < ranks or leaf_size(rows * length) % length
        return
    division = divide_rows(rows, length, ranks)
    leaf = leaf_size(rows * length)
    assert division.rows[0][0] == 0 and division.rows[-1][1] == rows
    for (_, stop), (start, _) in zip(division.rows, division.rows[1:]):
        assert stop == start and stop * length % leaf == 0
    assert all(first < last for first, last in division.rows)
    whole = SubtreeCounter(division.leaves)
    for roots in division.roots:
        for root in roots:
            whole.push(*root)
    assert whole.blocks == [(0, division.leaves)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("config", [HYBRID, UNTIED, SambaConfig(4096, 256, ("mamba3", "attention"), 4, 2, None, 768)])
def test_blocks_cover_the_parameters_in_whole_leaves(config, ranks):
    blocks = ParameterBlocks(config, ranks)
    assert [blocks.blocks[0].start, blocks.blocks[-1].stop] == [0, config.num_parameters]
    assert all(one.stop == next_.start for one, next_ in zip(blocks.blocks, blocks.blocks[1:]))
    starts, offset = {0}, 0
    for _, shape in config.registry():
        size = int(np.prod(shape))
        starts |= {offset + min(i, size) for i in range(0, size + leaf_size(size), leaf_size(size))}
        offset += size
    assert {block.start for block in blocks.blocks} <= starts
    if config.num_parameters > 1e6:
        assert max(b.stop - b.start for b in blocks.blocks) < 1.15 * config.num_parameters / ranks + 2048


# ---- the page ----------------------------------------------------------------------------------------------------

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "distributed.md"


def test_tables_of_the_page_are_those_of_the_model():
    from benchmarks.bench_distributed import tables

    text = PAGE.read_text(encoding="utf-8")
    for name, table in tables().items():
        assert table in text, f"{name}: take the table from python -m benchmarks.bench_distributed"


def test_refusal_on_the_page():
    with pytest.raises(ValueError) as refusal:
        divide_rows(2, 100, 2)
    assert str(refusal.value) in " ".join(PAGE.read_text(encoding="utf-8").split())


# ---- costs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("mode, config", [("identical", HYBRID), ("identical", UNTIED), ("deterministic", HYBRID)])
def test_cost_model_against_counted_messages(mode, config, ranks):
    n_shards = 6 if mode == "deterministic" else 1
    rows, length = 12, 64
    inputs, targets = batch(0, rows, length)

    def run(comm):
        stack = new_stack(comm, mode, config, n_shards=n_shards)
        stack.check_ranks()
        before = dataclasses.replace(comm.traffic)
        stack.train_step(inputs, targets)
        return [getattr(comm.traffic, name) - getattr(before, name) for name in vars(before)]

    counted = run_ranks(ranks, run)
    model = step_costs(config, rows, length, ranks, n_shards, inputs)
    for (messages, nbytes, control, _), cost in zip(counted, model):
        assert [messages, nbytes, control] == [cost.messages_sent, cost.bytes_sent, cost.control_messages]
    assert sum(cost.bytes_received for cost in model) == sum(cost.bytes_sent for cost in model)


def test_cost_of_an_even_division():
    """With as many leaves as a power of two, a step moves what a reduce-scatter and an all-gather move."""
    config = SambaConfig(64, 64, ("mamba3",) * 4)
    for ranks in (2, 4, 8):
        costs = step_costs(config, 64, 128, ranks)
        least = 2 * 4 * config.num_parameters * (ranks - 1) / ranks
        cotangents = 4 * 64 * 128 * 64 / ranks
        for cost in costs:
            assert cost.bytes_sent <= 1.05 * least + cotangents
            assert cost.messages_sent <= 3 * (ranks - 1)


def test_concurrent_groups_do_not_mix():
    def run(comm):
        return comm.gather(threading.current_thread().name) is not None

    for _ in range(3):
        assert run_ranks(4, run) == [True, False, False, False]
