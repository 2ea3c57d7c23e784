"""Plots of learning curves: the picture, and clear refusals."""

from __future__ import annotations

import io
import sys

import numpy as np
import pytest
from PIL import Image

from dreamerv3 import plot
from dreamerv3.main import main
from dreamerv3.suite import curves

SCORES = [(40_000, 0.0), (200_000, 30.0), (400_000, 90.0)]


def fails(capsys, *arguments):
    """Runs the program, which must fail; returns its error line."""
    assert plot.main([str(argument) for argument in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("plot: ")
    assert err.count("\n") == 1
    return err


# The picture.


def drawn(path):
    """The pixels of a PNG of the usual size."""
    with Image.open(io.BytesIO(path.read_bytes())) as image:
        assert image.format == "PNG"
        assert image.size == (plot.WIDTH, plot.HEIGHT)
        return np.asarray(image.convert("RGB")).astype(int)


def count(pixels, color):
    """How many pixels have a color, given as #rrggbb."""
    wanted = [int(color[index : index + 2], 16) for index in (1, 3, 5)]
    return int((np.abs(pixels - wanted).max(-1) < 8).sum())


def test_one_run_becomes_a_png(make_run, tmp_path, capsys):
    out = tmp_path / "new" / "curve.png"
    assert plot.main([str(make_run("a", SCORES)), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"Written: {out}\n"
    pixels = drawn(out)
    assert count(pixels, plot.COLORS[0]) > 500
    assert count(pixels, plot.COLORS[1]) == 0


def test_a_single_episode_is_enough(make_run, tmp_path):
    out = plot.render([make_run("a", [(0, 1.0)])], tmp_path / "curve.png")
    assert count(drawn(out), plot.COLORS[0]) > 10


def test_runs_of_one_label_are_one_curve_and_others_have_their_color(
    make_run, tmp_path
):
    logdirs = [make_run(name, SCORES, seed=seed) for seed, name in enumerate("abc")]
    together = drawn(plot.render(logdirs, tmp_path / "together.png"))
    assert count(together, plot.COLORS[0]) > 500
    assert count(together, plot.COLORS[1]) == 0
    labels = ["one", "one", "two"]
    apart = drawn(plot.render(logdirs, tmp_path / "apart.png", labels=labels))
    assert count(apart, plot.COLORS[1]) > 500


def test_the_published_curve_is_drawn_unless_left_out(make_run, tmp_path):
    logdir = make_run("a", SCORES)
    beside = drawn(plot.render([logdir], tmp_path / "a.png"))
    alone = drawn(plot.render([logdir], tmp_path / "b.png", reference="none"))
    assert count(beside, plot.FAINT) > count(alone, plot.FAINT) + 500


def test_a_legend_too_wide_for_a_row_takes_several(make_run, tmp_path):
    logdirs = [make_run(name, SCORES, seed=seed) for seed, name in enumerate("abcd")]
    labels = ["a rather long name"] * 2 + ["another long name"] * 2
    pixels = drawn(plot.render(logdirs, tmp_path / "curve.png", labels=labels))
    assert (pixels[:, -3:] == 255).all(), "nothing is cut off at the right"
    axes = pixels[plot.HEIGHT // 2 :]
    ink = np.flatnonzero((axes < 250).any((0, 2)))
    assert ink.max() > 0.95 * plot.WIDTH, "the curves have all of the width"


def test_steps_after_the_last_that_is_asked_for_are_left_out(make_run, tmp_path):
    logdir = make_run("a", SCORES)
    whole = plot.render([logdir], tmp_path / "whole.png")
    part = plot.render([logdir], tmp_path / "part.png", until=60_000)
    assert (drawn(whole) != drawn(part)).any()
    cut = make_run("b", SCORES[:2])
    expected = plot.render([cut], tmp_path / "cut.png", until=60_000)
    np.testing.assert_array_equal(drawn(part), drawn(expected))
    with pytest.raises(curves.PlotError, match="--until: expected a step from 10000"):
        plot.render([logdir], tmp_path / "none.png", until=9_000)


def test_no_published_curve_begins_before_its_first_score(make_run, tmp_path):
    logdir = make_run("a", [(1000, 1.0), (4000, 2.0)])
    pixels = drawn(plot.render([logdir], tmp_path / "a.png", until=5_000))
    alone = plot.render([logdir], tmp_path / "b.png", until=5_000, reference="none")
    np.testing.assert_array_equal(pixels, drawn(alone))


def test_another_metric_is_drawn_without_published_scores(make_run, tmp_path):
    logdir = make_run("a", SCORES, metric="train/loss/image")
    options = {"metric": "train/loss/image"}
    usual = plot.render([logdir], tmp_path / "a.png", **options)
    none = plot.render([logdir], tmp_path / "b.png", **options, reference="none")
    assert usual.read_bytes() == none.read_bytes()


@pytest.mark.parametrize(
    ("runs", "expected"),
    [
        ([("size12m", 0)], "atari100k_boxing, size12m, 1 seed"),
        ([("size12m", 0), ("size12m", 1)], "atari100k_boxing, size12m, 2 seeds"),
        ([("size12m", 3), ("size12m", 3)], "atari100k_boxing, size12m, 2 runs"),
        (
            [("size1m", 0), ("size12m", 0)],
            "atari100k_boxing, size1m and size12m, 2 runs",
        ),
    ],
)
def test_the_title_says_task_size_and_seeds(runs, expected):
    points = np.zeros(1)
    made = [
        curves.Curve("atari100k_boxing", size, seed, 4, points, points, {})
        for size, seed in runs
    ]
    assert plot.title(made) == expected


def test_runs_of_several_tasks_become_panels(make_run, tmp_path):
    make_run("runs/a0", SCORES)
    make_run("runs/a1", SCORES, seed=1)
    make_run("runs/b", SCORES, flags=("--task", "gym_CartPole-v1"))
    (tmp_path / "runs/notes").mkdir()
    out = plot.render([tmp_path / "runs/*"], tmp_path / "grid.png")
    with Image.open(out) as image:
        assert image.size[0] == 2 * plot.PANEL[0]
        pixels = np.asarray(image.convert("RGB")).astype(int)
    left, right = pixels[:, : plot.PANEL[0]], pixels[:, plot.PANEL[0] :]
    sizes = [plot.COLORS[0], plot.COLORS[1]]  # size12m, and the full size.
    assert count(left[100:], sizes[0]) > 200
    assert count(left[100:], sizes[1]) == 0
    assert count(right[100:], sizes[1]) > 200


def test_the_picture_has_a_panel_for_every_task(make_run, tmp_path):
    flags = [("--configs", "atari100k", "--task", f"atari100k_{x}") for x in "abcde"]
    runs = [make_run(f"{i}", SCORES, flags=x) for i, x in enumerate(flags)]
    with Image.open(plot.render(runs, tmp_path / "curves.png")) as image:
        pixels = np.asarray(image.convert("RGB")).astype(int)
    width, height = plot.PANEL
    assert pixels.shape[:2] == (2 * height + plot.MARGIN, 3 * width)
    panels = [
        panel
        for row in np.array_split(pixels[plot.MARGIN :], 2)
        for panel in np.array_split(row, 3, axis=1)
    ]
    assert all(count(panel, plot.COLORS[0]) > 10 for panel in panels[:5])
    assert (panels[5] == 255).all()


@pytest.mark.filterwarnings("error")
def test_panels_keep_their_size_below_many_labels(make_run, tmp_path):
    runs, labels = [], []
    for task in ("atari100k_a", "atari100k_b"):
        for index in range(13):
            flags = ("--configs", "atari100k", "--task", task)
            runs.append(make_run(f"{task}{index}", SCORES, flags=flags))
            labels.append(f"method number {index} with a setting of its own")
    with Image.open(plot.render(runs, tmp_path / "many.png", labels=labels)) as image:
        width, height = image.size
        pixels = np.asarray(image.convert("RGB")).astype(int)
    assert width == 2 * plot.PANEL[0]
    assert height > plot.PANEL[1] + 13 * 15
    # Grid lines are as far apart as without a legend.
    lower = pixels[-plot.PANEL[1] :, : plot.PANEL[0]]
    lines = np.flatnonzero((np.abs(lower - [224, 224, 224]).max(-1) < 12).sum(1) > 150)
    assert lines.max() - lines.min() > 0.5 * plot.PANEL[1]


def test_a_task_has_a_panel_for_each_kind_of_observations(make_run, tmp_path):
    task = ("--task", "dmc_walker_walk")
    proprio = make_run("a", SCORES, flags=("--configs", "dmc_proprio", *task))
    vision = make_run("b", SCORES, flags=("--configs", "dmc_vision", *task))
    with Image.open(plot.render([proprio, vision], tmp_path / "two.png")) as image:
        assert image.size[0] == 2 * plot.PANEL[0]


def test_wildcards_find_runs_at_any_depth(make_run, tmp_path, monkeypatch):
    runs = [make_run("runs/a", SCORES), make_run("runs/deep/b", SCORES, seed=1)]
    assert plot.find_runs(tmp_path / "runs/**") == runs
    assert plot.find_runs(tmp_path / "runs/*") == runs[:1]
    assert plot.find_runs(runs[0]) == runs[:1]
    monkeypatch.setenv("HOME", str(tmp_path))
    assert plot.find_runs("~/runs/*") == runs[:1]


def test_a_picture_can_be_svg(make_run, tmp_path):
    logdir = make_run("a", SCORES)
    out = plot.render([logdir], tmp_path / "curve.svg")
    text = out.read_text()
    assert text.startswith("<?xml")
    assert plot.COLORS[0] in text
    again = plot.render([logdir], tmp_path / "again.svg")
    assert again.read_text() == text


def test_the_program_plots_a_run_and_others(make_run, tmp_path):
    logdir = make_run("a", SCORES)
    assert main(["--script", "plot", "--logdir", str(logdir)]) == 0
    assert count(drawn(logdir / "scores.png"), plot.COLORS[0]) > 500
    out = tmp_path / "both.svg"
    make_run("b", SCORES, seed=1)
    given = ["--plot.runs", str(tmp_path / "*"), "--plot.out", str(out)]
    assert main(["--script", "plot", *given]) == 0
    assert out.read_text().startswith("<?xml")
    assert main(["--script", "plot", "--plot.runs", str(tmp_path / "none*")]) == 2


# Refusals.


def test_without_runs_there_is_no_picture(tmp_path):
    with pytest.raises(curves.PlotError, match="found none"):
        plot.render([], tmp_path / "curves.png")


def test_wildcards_without_a_run_are_refused(tmp_path, capsys):
    line = fails(capsys, tmp_path / "none*", "--out", tmp_path / "a.png")
    assert "expected wildcards that match logdirs of runs" in line


def test_a_folder_that_is_not_there_is_named(tmp_path, capsys):
    line = fails(capsys, tmp_path / "gone", "--out", tmp_path / "a.png")
    assert f"{tmp_path / 'gone'}: expected the logdir of a run" in line


def test_a_folder_without_configuration_is_named(tmp_path, capsys):
    line = fails(capsys, tmp_path, "--out", tmp_path / "a.png")
    assert "has no config.yaml" in line


def test_missing_scores_are_named(make_run, tmp_path, capsys):
    logdir = make_run("a", None)
    line = fails(capsys, logdir, "--out", tmp_path / "a.png")
    assert f"{logdir}: expected scores.jsonl or metrics.jsonl" in line


def test_a_run_without_an_episode_says_so(make_run, tmp_path, capsys):
    line = fails(capsys, make_run("a", []), "--out", tmp_path / "a.png")
    assert "expected values of episode/score, found none" in line
    assert not (tmp_path / "a.png").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"step": 1}\nnonsense\n{"step": 2}\n', "line 2 is not a JSON object"),
        ('[]\n{"step": 2}\n', "line 1 is not a JSON object"),
        ('{"episode/score": 2}\n', "expected a number for step"),
        ('{"step": 1, "episode/score": "high"}\n', "expected a number for step"),
    ],
)
def test_damaged_files_are_named(make_run, tmp_path, capsys, text, message):
    logdir = make_run("a", None)
    (logdir / "scores.jsonl").write_text(text)
    line = fails(capsys, logdir, "--out", tmp_path / "a.png")
    assert str(logdir / "scores.jsonl") in line
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--metric", "train/nothing"), "expected metrics.jsonl"),
        (("--reference", "chess"), "expected none or one of atari100k_alien, "),
        (("--label", "one", "two"), "expected one for each of 1 runs, got 2"),
        (("--out", "curve.jpg"), "expected a file name that ends in .png or .svg"),
        (("--out", "/dev/null/curve.png"), "cannot be written"),
    ],
)
def test_flags_that_do_not_fit_are_refused(
    make_run, tmp_path, capsys, arguments, message
):
    out = ("--out", tmp_path / "a.png")
    assert message in fails(capsys, make_run("a", SCORES), *out, *arguments)


@pytest.mark.parametrize(
    "arguments", [("--window", "0"), ("--steps-per", "-1"), ("--steps-per", "few")]
)
def test_widths_are_positive(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        plot.main(["logdir", "--out", "a.png", *arguments])
    assert stopped.value.code == 2
    assert "expected a number above 0" in capsys.readouterr().err


def test_without_matplotlib_the_program_says_what_to_install(
    make_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    line = fails(capsys, make_run("a", SCORES), "--out", tmp_path / "a.png")
    assert "pip install 'dreamerv3-parallel[plot]'" in line
