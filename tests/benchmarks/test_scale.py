"""The benchmark of many env clients, with few of them."""

import json

import pytest

from benchmarks import scale


def test_few_clients_have_no_errors_and_their_figures_are_whole():
    found = scale.many_clients(3, seconds=1)
    assert found["errors"] == 0
    assert found["rows_per_s"] > 0
    assert 0 < found["half_load"]["p50_ms"] <= found["half_load"]["p99_ms"]
    assert found["actor_mb_per_client"] < 20  # With so few, mostly fixed costs.


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_measurements_end_with_a_line_of_json(capsys):
    flags = ["--clients", "3", "6", "--vanish", "3", "--seconds", "0.5"]
    flags += ["--envs", "8", "--stacked", "4", "--delay", "0.2"]
    assert scale.main(flags) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert "vanish" not in result["clients_3"]
    assert result["clients_6"]["vanish"]["clients"] == 3
    near, far = result["delayed"].values()
    assert far["p50_ms"] >= 200 > near["p50_ms"]
