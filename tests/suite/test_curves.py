"""Learning curves: the numbers in them, and the files they come from."""

from __future__ import annotations

import numpy as np
import pytest
from curve_testing import PROPRIO
from hypothesis import given
from hypothesis import strategies as st

from dreamerv3.cli.config import load_config
from dreamerv3.cli.schema import read_keys
from dreamerv3.suite import curves, presets

SCORES = [(4_000, 1.0), (8_000, 3.0), (20_000, 8.0)]


def make_curve(steps, values):
    return curves.Curve("task", "size", 0, 1, np.array(steps, float), values, {})


# Numbers.


def test_a_running_mean_leaves_out_what_is_not_finite():
    values = np.array([np.nan, 1.0, np.inf, 6.0])
    mean = curves.running_mean(values, 2)
    np.testing.assert_array_equal(mean, [np.nan, 1, 1, 6])


def test_a_running_mean_of_single_values_is_exact():
    values = np.array([1e20, 0.0013, np.inf, 2.0])
    mean = curves.running_mean(values, 1)
    np.testing.assert_array_equal(mean, [1e20, 0.0013, np.nan, 2.0])


def test_a_running_mean_takes_what_there_is_at_the_start():
    mean = curves.running_mean(np.array([2.0, 4.0, 6.0, 0.0]), 3)
    assert mean.tolist() == [2.0, 3.0, 4.0, 10 / 3]


@given(st.lists(st.integers(-1000, 1000), min_size=1), st.integers(1, 200))
def test_a_running_mean_is_that_of_a_slow_loop(values, window):
    slow = [
        np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
    ]
    np.testing.assert_allclose(curves.running_mean(np.array(values), window), slow)


@pytest.mark.parametrize(
    ("episodes", "window"), [(1, 1), (4, 1), (120, 12), (5000, 100)]
)
def test_the_usual_window_is_a_tenth_within_bounds(episodes, window):
    assert curves.default_window(episodes) == window


def test_bins_average_interpolate_between_and_leave_out_what_lies_outside():
    steps, values = np.array([10.0, 19.0, 30.0, 59.0]), np.array([1.0, 3.0, 6.0, 9.0])
    means = curves.bin_means(steps, values, width=10, bins=7)
    np.testing.assert_array_equal(means, [np.nan, 2, 4, 6, 7.5, 9, np.nan])


def test_a_band_covers_the_bins_that_all_runs_cover():
    runs = [
        make_curve([1, 11, 12, 21], np.array([0.0, 10.0, 20.0, 30.0])),
        make_curve([15, 25, 39], np.array([5.0, 50.0, 99.0])),
    ]
    band = curves.band(runs, width=10)
    assert band.steps.tolist() == [15, 25]
    assert band.mean.tolist() == [10, 40]
    assert band.low.tolist() == [5, 30]
    assert band.high.tolist() == [15, 50]


def test_an_episode_at_the_end_of_the_last_bin_belongs_to_it():
    band = curves.band([make_curve([5, 20], np.array([1.0, 3.0]))], width=10)
    assert band.steps.tolist() == [5, 15]
    assert band.mean.tolist() == [1, 3]


def test_runs_that_have_no_bin_in_common_have_no_band():
    runs = [make_curve([1], np.array([1.0])), make_curve([99], np.array([2.0]))]
    assert len(curves.band(runs, width=10).mean) == 0


# Files.


def test_logged_steps_become_agent_steps(make_run):
    run = curves.read_run(make_run("a", SCORES, seed=7))
    assert run.steps.tolist() == [1_000, 2_000, 5_000]
    assert run.values.tolist() == [1, 3, 8]
    assert (run.task, run.size, run.seed, run.repeat) == (
        "atari100k_boxing",
        "size12m",
        7,
        4,
    )


def test_steps_of_a_task_without_repeat_stay_as_they_are(make_run):
    flags = ("--task", "gym_CartPole-v1")
    assert curves.read_run(make_run("a", SCORES, flags=flags)).steps[-1] == 20_000


@pytest.mark.parametrize(
    ("flags", "size"),
    [
        ((), "size200m"),
        (("--configs", "size1m"), "size1m"),
        (("--agent.dyn.rssm.deter", "4096"), "4096 recurrent units"),
        (("--random_agent", "True"), "random agent"),
    ],
)
def test_the_size_is_named_as_its_block(make_run, flags, size):
    assert curves.read_run(make_run("a", SCORES, flags=flags)).size == size


def test_null_and_a_line_that_is_being_written_are_left_out(make_run):
    logdir = make_run("a", [(8, 2.0), (4, 1.0), (12, None), (16, float("nan"))])
    with (logdir / "scores.jsonl").open("a") as file:
        file.write('{"step": 20, "epis')
    run = curves.read_run(logdir)
    assert run.steps.tolist() == [1, 2]
    assert run.values.tolist() == [1, 2]


def test_scores_come_from_the_metrics_where_they_have_no_file(make_run):
    logdir = make_run("a", SCORES)
    (logdir / "scores.jsonl").rename(logdir / "metrics.jsonl")
    assert curves.read_run(logdir).values.tolist() == [1, 3, 8]


def test_a_run_has_reached_the_step_of_its_metrics(make_run):
    logdir = make_run("a", SCORES)
    row = '{"step": 24000, "fps/env": 3.0}'
    (logdir / "metrics.jsonl").write_text(f'{row}\n{{"step": 28000, "fps')
    assert curves.last_step(logdir) == 24_000
    assert curves.read_run(logdir).reached == 6_000


@pytest.mark.parametrize(("last", "reached"), [(60_000, 15_000), (396_000, 110_000)])
def test_without_metrics_the_last_episode_tells_how_far_a_run_came(
    make_run, last, reached
):
    run = curves.read_run(make_run("a", [*SCORES, (last, 1.0)]))
    assert run.reached == reached


def test_the_last_row_of_a_long_file_is_found(tmp_path):
    path = tmp_path / "scores.jsonl"
    rows = [f'{{"step": {step}, "episode/score": {step / 2}}}' for step in range(9999)]
    path.write_text("\n".join([*rows, '{"step": 10000, "episode/score": null}', ""]))
    assert path.stat().st_size > curves.TAIL_BYTES
    assert curves.last_score(tmp_path) == 9998 / 2
    assert curves.last_row(path, "other") is None
    assert curves.last_row(tmp_path / "none", "step") is None


def find_published(run):
    return presets.find_published(run.config, run.task)


def test_the_published_curve_of_the_task_is_found(make_run):
    published = find_published(curves.read_run(make_run("a", SCORES)))
    assert published.suite == "atari100k"
    assert published.steps[[0, -1]].tolist() == [10_000, 100_000]
    assert published.mean[-1] == pytest.approx(79, abs=1)
    assert published.seeds.shape == (5, 10)
    assert published.bounds == (0.1, 12.1)
    assert (published.unit, published.per_step) == ("agent steps", 1)


@pytest.mark.parametrize("repeat", ["1", "2"])
def test_two_published_frames_are_an_agent_step(make_run, repeat):
    flags = (*PROPRIO, "--env.dmc.repeat", repeat)
    run = curves.read_run(make_run("a", SCORES, flags=flags))
    published = find_published(run)
    assert published.suite == "dmc_proprio"
    assert published.steps[-1] == 245_000
    assert (published.unit, published.per_step) == ("frames", 2)


def test_runs_are_compared_with_those_that_saw_the_task_the_same_way(make_run):
    run = curves.read_run(make_run("a", SCORES, flags=("--configs", "dmc_vision")))
    assert find_published(run).suite == "dmc_vision"
    both = ("--task", "dmc_walker_walk")
    run = curves.read_run(make_run("b", SCORES, flags=both))
    assert find_published(run) is None


def test_tasks_without_published_scores_have_no_curve(make_run):
    flags = ("--task", "gym_CartPole-v1")
    run = curves.read_run(make_run("a", SCORES, flags=flags))
    assert find_published(run) is None


def test_the_published_curve_of_another_task_can_be_chosen(make_run):
    run = curves.read_run(make_run("a", SCORES))
    assert presets.find_published(run.config, "atari100k_pong").mean[-1] < 0
    assert "dmc_quadruped_run" in presets.published_tasks()


@pytest.mark.parametrize(
    ("step", "steps", "values"),
    [(15, [0, 10, 15], [0, 5, 6]), (10, [0, 10], [0, 5]), (99, [0, 10, 20], [0, 5, 7])],
)
def test_a_published_curve_ends_where_it_is_asked_to(step, steps, values):
    whole = presets.PublishedCurve(
        suite="s",
        task="t",
        steps=np.array([0.0, 10, 20]),
        seeds=np.array([[0.0, 5, 7]]),
        bounds=(0, 1),
        unit="frames",
        per_step=1,
    )
    part = whole.until(step)
    np.testing.assert_allclose(part.steps, steps)
    np.testing.assert_allclose(part.mean, values)


@pytest.mark.parametrize(
    ("name", "tasks", "steps"),
    [
        ("atari100k", 26, 100_000),
        ("dmc_proprio", 18, 250_000),
        ("dmc_vision", 20, 500_000),
        ("crafter", 1, 1_000_000),
    ],
)
def test_presets_are_whole_and_their_settings_are_accepted(name, tasks, steps):
    preset = presets.make_presets()[name]
    assert len(set(preset.tasks)) == tasks
    config = load_config(
        ["--configs", *preset.configs, *preset.flags, "--task", preset.tasks[-1]], {}
    )
    assert config.run.steps == steps
    rule = read_keys()["suite.preset"].rule
    assert rule is not None and rule.accepts(name)


def test_dmc_proprio_has_the_published_setting():
    preset = presets.make_presets()["dmc_proprio"]
    config = load_config(["--configs", *preset.configs, *preset.flags], {})
    run = (config.run.train_ratio, config.run.envs, config.env.dmc.repeat)
    assert run == (512, 16, 2)
    assert config.agent.dyn.rssm.deter == 2048
    assert config.env.dmc.proprio and not config.env.dmc.image
