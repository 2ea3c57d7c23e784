"""Crafter's score from the result of an evaluation."""

import json

import pytest

from benchmarks import crafter


def write(folder, largest):
    path = folder / "1000.json"
    result = {"step": 1000, "episodes": 4, "mean_score": 2.5, "largest": largest}
    path.write_text(json.dumps(result))
    return str(path)


def test_success_is_reaching_it_once_in_an_episode(tmp_path, capsys):
    path = write(
        tmp_path,
        {
            "log/achievement_collect_wood": [3, 0, 1, 7],
            "log/achievement_sleep": [0, 0, 0, 0],
            "log/reward": [1, 1, 1, 1],
        },
    )
    assert crafter.main([path]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [
        ["collect_wood", "75.0%"],
        ["sleep", "0.0%"],
    ]
    # The square root of 76 times 1, less 1.
    expected = {"step": 1000, "episodes": 4, "score": 7.72}
    assert json.loads(last) == {**expected, "mean_reward": 2.5, "reached": 1}


@pytest.mark.parametrize(("rates", "score"), [((100, 100), 100), ((0, 0), 0)])
def test_equal_rates_are_the_score(rates, score):
    assert crafter.score(dict(zip("ab", rates))) == pytest.approx(score)


@pytest.mark.parametrize("largest", [{}, {"log/reward": [1.0]}])
def test_without_achievements_it_says_what_to_do(tmp_path, capsys, largest):
    with pytest.raises(SystemExit):
        crafter.main([write(tmp_path, largest)])
    assert "--env.crafter.logs True" in capsys.readouterr().err
