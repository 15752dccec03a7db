"""The history of `make bench`: what counts as a regression."""

import json

import pytest

import benchmarks.__main__ as bench


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measurements that a test sets instead of taking them; each row is measured as often as it is asked for."""
    values = {}

    def measure(options, threads):
        speed, digest = values[options].pop(0)
        return {"tokens_per_second": speed, "peak_mib": 100.0, "digest": digest}

    monkeypatch.setattr(bench, "HISTORY", tmp_path)
    monkeypatch.setattr(bench, "ROWS", {"one": "1", "two": "2"})
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench.sys, "argv", ["benchmarks", "--threads", "2"])
    dates = (f"2026-01-01T00:00:{second:02}Z" for second in range(60))
    monkeypatch.setattr(bench.time, "strftime", lambda *_: next(dates))

    def run(one, two):
        values.update({"1": list(one), "2": list(two)})
        return bench.main()

    run.folder = tmp_path
    return run


def test_a_record_is_kept_and_compared_with(measured, capsys):
    assert measured([(1000, "a")], [(50, "b")]) == 0
    assert measured([(1100, "a")], [(46, "b")]) == 0
    out = capsys.readouterr().out
    assert "1.10" in out
    assert "0.92" in out
    records = [json.loads(path.read_text()) for path in sorted(measured.folder.glob("*.json"))]
    assert [record["rows"]["one"]["tokens_per_second"] for record in records] == [1000, 1100]
    assert records[0]["threads"] == 2
    assert set(records[0]["machine"]) == {"machine", "cpu_flags", "cores", "instruction_set"}


def test_a_regression_that_repeats_fails_and_leaves_no_record(measured, capsys):
    measured([(1000, "a")], [(50, "b")])
    assert measured([(880, "a"), (890, "a")], [(50, "b")]) == 1
    assert "one: 0.89 of the last record's speed, twice" in capsys.readouterr().err
    assert len(list(measured.folder.glob("*.json"))) == 1


def test_a_slow_moment_is_measured_again(measured):
    measured([(1000, "a")], [(50, "b")])
    assert measured([(500, "a"), (990, "a")], [(50, "b")]) == 0
    newest = json.loads(max(measured.folder.glob("*.json")).read_text())
    assert newest["rows"]["one"]["tokens_per_second"] == 990


def test_a_changed_digest_fails(measured, capsys):
    measured([(1000, "a")], [(50, "b")])
    assert measured([(1000, "a")], [(50, "c")]) == 1
    assert "two: the digest has changed" in capsys.readouterr().err
