"""Flags of the benchmarks of whole runs."""

import pytest

from benchmarks import end_to_end, simulated


def test_cases_stand_for_the_flags_of_each():
    options = end_to_end.parse(["--duty", "--cases", "512:16", "32:64:4"])
    found = [(x.ratio, x.envs, x.per_worker) for x in end_to_end.cases(options)]
    assert found == [(512.0, 16, 1), (32.0, 64, 4)]
    assert {case.size for case in end_to_end.cases(options)} == {"size12m"}


def test_without_cases_the_flags_are_the_only_one():
    options = end_to_end.parse(["--duty", "--envs", "8"])
    assert [(x.ratio, x.envs) for x in end_to_end.cases(options)] == [(32.0, 8)]


@pytest.mark.parametrize("text", ["512", "a:16", "32:0", "32:16:0", "1:2:3:4", "1:x"])
@pytest.mark.parametrize("parse", [end_to_end.parse, simulated.parse])
def test_cases_that_cannot_be_read_are_refused(parse, text, capsys):
    with pytest.raises(SystemExit):
        parse(["--cases", text])
    assert f"RATIO:ENVS:PER_WORKER, got '{text}'" in capsys.readouterr().err


def test_cases_are_not_ignored(capsys):
    with pytest.raises(SystemExit):
        end_to_end.parse(["--cases", "512:16"])
    assert "--cases is for --duty" in capsys.readouterr().err


def test_the_bottleneck_is_what_a_run_tells():
    told = "Step 5, 6 steps/s. Bottleneck: actor: it is busy 64% of the time.\n"
    assert end_to_end.BOTTLENECK.findall(told) == ["actor: it is busy 64% of the time."]
