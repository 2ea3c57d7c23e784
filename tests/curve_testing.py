"""Fixtures for conftests: logdirs of runs whose curves tests read, compare and draw."""

from __future__ import annotations

import json

import pytest

from dreamerv3.cli.config import load_config
from dreamerv3.cli.logdir import prepare_logdir

BOXING = ("--configs", "atari100k", "size12m", "--task", "atari100k_boxing")
PROPRIO = ("--configs", "dmc_proprio", "size12m", "--env.dmc.repeat", "2")


@pytest.fixture(scope="session")
def config_text(tmp_path_factory):
    """Returns a function from flags to the `config.yaml` that the program writes."""
    known: dict[tuple[str, ...], str] = {}

    def text(flags):
        if flags not in known:
            logdir = tmp_path_factory.mktemp("config")
            prepare_logdir(load_config([*flags, "--logdir", str(logdir)], {}))
            known[flags] = (logdir / "config.yaml").read_text()
        return known[flags]

    return text


@pytest.fixture
def make_run(tmp_path, config_text):
    """Returns a function that writes the logdir of a run, by default of Boxing.

    The run's scores are pairs of logged step and value.
    """

    def make(name, scores, flags=BOXING, seed=0, metric="episode/score"):
        logdir = tmp_path / name
        logdir.mkdir(parents=True)
        text = config_text(flags)
        assert "\nseed: 0\n" in text
        text = text.replace("\nseed: 0\n", f"\nseed: {seed}\n")
        (logdir / "config.yaml").write_text(text)
        if scores is not None:
            rows = [json.dumps({"step": step, metric: value}) for step, value in scores]
            filename = "scores.jsonl" if metric == "episode/score" else "metrics.jsonl"
            (logdir / filename).write_text("".join(f"{row}\n" for row in rows))
        return logdir

    return make
