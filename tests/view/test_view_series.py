"""Columns of metrics: read as they grow, thinned without losing extremes."""

from __future__ import annotations

import json

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dreamerv3.view import series
from dreamerv3.view.series import MetricFile, sample_file, thin


def append(path, *rows):
    with path.open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def test_a_file_is_read_as_it_grows(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricFile(path)
    assert not file.update()
    append(path, {"step": 1, "a": 1.5}, {"step": 2, "a": 2.5, "b": 3})
    assert file.update() and file.names() == ["a", "b"]
    append(path, {"step": 3, "a": None}, {"step": 4, "a": 4.5})
    with path.open("a") as half:
        half.write('{"step": 5, "a"')
    assert file.update() and not file.update()
    steps, values = file.column("a")
    assert steps.tolist() == [1, 2, 4] and values.tolist() == [1.5, 2.5, 4.5]
    with path.open("a") as half:
        half.write(": 5.5}\n")
    file.update()
    assert file.column("a")[1].tolist() == [1.5, 2.5, 4.5, 5.5]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": i, "a": i} for i in range(100)))
    file = MetricFile(path)
    file.update()
    path.write_text('{"step": 7, "b": 1}\n')
    file.update()
    assert file.names() == ["b"]


def test_a_run_that_went_back_and_wrote_more_since_is_read_anew(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, *({"step": i, "a": 1} for i in range(20)))
    file = MetricFile(path)
    file.update()
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:10]))
    append(path, *({"step": i, "a": 2} for i in range(10, 40)))
    file.update()
    steps, values = file.column("a")
    assert steps.tolist() == list(range(40))
    assert values.tolist() == [1] * 10 + [2] * 30


def test_what_is_no_row_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    good = json.dumps({"step": 1, "<b>../x</b>": 2.0, "text": "no", "t": True})
    rows = ["nonsense", "[1, 2]", "null", good, '{"step": "1", "a": 1}', '{"a": 1}']
    rows.append('{"step": 2, "a": ' + "9" * 400 + "}")
    rows.append('{"step": 2, "a": NaN, "c": Infinity}')
    path.write_text("\n".join(rows) + "\n")
    file = MetricFile(path)
    file.update()
    assert file.names() == ["<b>../x</b>"]


def test_lines_longer_than_a_block_are_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    append(path, {"step": 1, **{f"name{i}": i for i in range(4000)}, "x": "y" * 2**21})
    append(path, {"step": 2, "name1": 5})
    file = MetricFile(path)
    file.update()
    assert file.column("name1")[1].tolist() == [1, 5]


points = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(points, st.integers(2, 60))
def test_thinning_keeps_ends_and_extremes(values, limit):
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)
    thin_x, thin_y = thin(x, y, limit)
    assert len(thin_x) <= max(2, limit) and np.all(np.diff(thin_x) > 0)
    assert thin_y.min() == y.min() and thin_y.max() == y.max()
    assert set(zip(thin_x, thin_y)) <= set(zip(x, y))


def test_thinning_sorts_a_run_that_went_back_and_leaves_out_what_is_not_finite():
    x, y = np.array([1.0, 5.0, 3.0, 4.0]), np.array([1.0, np.nan, 3.0, np.inf])
    assert [part.tolist() for part in thin(x, y, 10)] == [[1, 3], [1, 3]]
    assert [len(part) for part in thin(np.zeros(0), np.zeros(0), 10)] == [0, 0]


def test_a_long_file_is_sampled_without_reading_it(tmp_path):
    path = tmp_path / "scores.jsonl"
    append(path, *({"step": i, "s": 2 * i} for i in range(20_000)))
    with path.open("a") as half:
        half.write('{"step": 99999999, "s"')
    found = sample_file(path, "s", 50)
    assert 45 <= len(found) <= 50 and found[-1] == (19_999, 39_998)
    assert [step for step, _ in found] == sorted(step for step, _ in found)
    assert all(value == 2 * step for step, value in found)
    assert sample_file(tmp_path / "none", "s", 50) == []


def test_a_file_with_too_many_values_is_thinned(tmp_path, monkeypatch):
    monkeypatch.setattr(series, "MOST_POINTS", 1000)
    monkeypatch.setattr(series, "BLOCK", 1 << 12)
    path = tmp_path / "scores.jsonl"
    append(path, *({"step": i, "s": 1e6 if i == 700 else i} for i in range(20_000)))
    file = MetricFile(path)
    file.update()
    steps, values = file.column("s")
    assert 300 <= len(steps) == file.points <= 1200
    assert (steps[0], steps[-1]) == (0, 19_999)
    assert 1e6 in values  # Extremes are kept.
    file.forget()
    assert file.points == 0 and file.update()
