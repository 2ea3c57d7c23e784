"""Scores at steps, tables per task and over tasks, and the picture."""

from __future__ import annotations

import csv
import dataclasses
import io
import json

import numpy as np
import pytest
from curve_testing import PROPRIO

from dreamerv3.suite import presets, score_table
from dreamerv3.suite.curves import Curve, read_run

KRULL = ("--configs", "atari100k", "size12m", "--task", "atari100k_krull")
POLE = ("--configs", "cartpole", "--run.steps", "1000")


def make_curve(steps, values, reached):
    steps, values = np.array(steps, float), np.array(values, float)
    return Curve("t", "size", 0, 1, steps, values, {}, reached)


def every(count, value, repeat=4):
    """Episodes of Atari that end every 5,000 agent steps, all with the same score."""
    return [(5_000 * repeat * index, value) for index in range(1, count + 1)]


def tasks_below(folder):
    runs, problems = score_table.find_runs(folder)
    assert problems == []
    return score_table.group_by_task(runs)


# Scores at steps.


def test_a_score_is_the_mean_of_what_ended_in_the_interval_before():
    run = make_curve([5, 10, 11, 20, 21], [1, 3, 10, 20, 99], reached=25)
    scores, episodes = score_table.interval_scores(run, np.array([10.0, 20.0]), 10)
    assert scores.tolist() == [2, 15]
    assert episodes.tolist() == [2, 2]


def test_an_empty_interval_has_the_score_of_the_last_episodes_before_it():
    run = make_curve([12, 15, 18], [1, 3, 8], reached=41)
    steps = np.array([10.0, 20.0, 30.0, 40.0, 50.0])
    scores, episodes = score_table.interval_scores(run, steps, 5)
    np.testing.assert_array_equal(scores, [np.nan, 8, 5.5, 5.5, np.nan])
    assert episodes.tolist() == [0, 1, 0, 0, 0]


def test_the_intervals_of_uneven_steps_are_as_long_as_the_shortest(make_run, tmp_path):
    # Logged steps are frames. The last interval is from 480,000 on.
    make_run(
        "suite/a", [(470_000, 100.0), (485_000, 700.0), (495_000, 0.0)], flags=PROPRIO
    )
    (task,) = tasks_below(tmp_path / "suite")
    assert task.unit == "frames"
    assert task.told(len(task.steps) - 1) == 490_000
    assert task.scores[0, -1] == 700


def test_runs_are_compared_at_the_last_step_that_the_most_have_come_to(
    make_run, tmp_path
):
    for seed, count in enumerate((20, 12, 12)):
        make_run(f"suite/seed{seed}", every(count, 10.0 * seed), seed=seed)
    (task,) = tasks_below(tmp_path / "suite")
    assert task.told(task.compared) == 60_000
    assert task.at(task.compared).tolist() == [0, 10, 20]


def test_tasks_without_published_scores_have_ten_even_steps(make_run, tmp_path):
    scores = [(step, float(step)) for step in range(50, 1001, 50)]
    make_run("suite/pole/seed0", scores, flags=POLE)
    (task,) = tasks_below(tmp_path / "suite")
    assert task.steps.tolist() == list(range(100, 1001, 100))
    assert task.scores[0].tolist() == [75 + 100 * index for index in range(10)]


def test_a_run_without_an_end_is_divided_as_far_as_it_came(make_run, tmp_path):
    flags = ("--task", "gym_CartPole-v1")
    make_run("suite/a", [(10, 1.0), (200, 2.0)], flags=flags)
    (task,) = tasks_below(tmp_path / "suite")
    assert task.steps[-1] == 200


# Tables.


def test_tables_have_ours_beside_the_published(make_run, tmp_path):
    folder = tmp_path / "suite"
    make_run("suite/boxing/seed0", every(20, 60.1))
    make_run("suite/boxing/seed1", every(20, 84.1), seed=1)
    make_run("suite/krull/seed0", every(20, 2665.5), flags=KRULL)
    make_run("suite/pole/seed0", [(500, 20.0), (1000, 30.0)], flags=POLE)
    score_table.write_tables(folder, tasks_below(folder), ["something was odd"])

    table = json.loads((folder / "table.json").read_text())
    rows = {row["task"]: row for row in table["tasks"]}
    boxing = rows["atari100k_boxing"]
    assert boxing["step"] == 100_000
    assert boxing["seeds"] == [0, 1]
    assert boxing["mean"]["value"] == pytest.approx(72.1)
    assert boxing["mean"]["interval"] == [60.1, 84.1]
    assert boxing["normalised"] == pytest.approx((5 + 7) / 2)
    assert boxing["published"]["mean"]["value"] == pytest.approx(79, abs=1)
    assert rows["atari100k_krull"]["mean"]["interval"] is None
    assert "published" not in rows["gym_CartPole-v1"]

    suite = table["suites"]["atari100k"]
    assert (suite["tasks"], suite["runs"]) == (2, 3)
    # Krull, at the human score, has one run and counts as much as Boxing.
    assert suite["ours"]["mean"]["value"] == pytest.approx((6 + 1) / 2)
    assert suite["ours"]["median"]["value"] == pytest.approx(3.5)
    assert suite["ours"]["iqm"]["value"] == pytest.approx((1 + 5) / 2)
    assert suite["published"]["mean"]["value"] > 1
    assert table["settings"]["size"] == ["128 recurrent units", "size12m"]

    rows = list(csv.DictReader(io.StringIO((folder / "scores.csv").read_text())))
    mine = [row for row in rows if row["logdir"] == "boxing/seed1"]
    assert [int(row["step"]) for row in mine] == list(range(10_000, 100_001, 10_000))
    for row in mine:
        assert (row["task"], row["seed"]) == ("atari100k_boxing", "1")
        assert (row["score"], row["episodes"]) == ("84.1", "2")

    text = (folder / "table.md").read_text()
    assert "- something was odd" in text
    assert "| atari100k_boxing | 100,000 | 2 | 72.1 | 60.1 to 84.1 |" in text
    assert "## atari100k: 2 tasks, 3 runs, human-normalised" in text


def test_the_published_scores_have_their_known_aggregates(make_run):
    # The aggregates of all 26 games, by the same method, from the published runs only.
    run = read_run(make_run("a", every(20, 0.0)))
    games = presets.make_presets()["atari100k"].tasks
    runs = [dataclasses.replace(run, task=task) for task in games]
    table = score_table.make_table(score_table.group_by_task(runs))
    published = table["suites"]["atari100k"]["published"]
    assert table["suites"]["atari100k"]["tasks"] == 26
    for name, estimate in published.items():
        low, high = estimate["interval"]
        assert low < estimate["value"] < high, name
    assert 1.0 < published["mean"]["value"] < 1.5
    assert 0.4 < published["median"]["value"] < 0.6


def test_runs_that_have_no_episode_yet_are_named(make_run, tmp_path):
    logdir = make_run("suite/a", [])
    runs, problems = score_table.find_runs(tmp_path / "suite")
    assert runs == []
    assert len(problems) == 1 and str(logdir) in problems[0]
    score_table.write_tables(tmp_path / "suite", [], problems)
    assert str(logdir) in (tmp_path / "suite/table.md").read_text()
