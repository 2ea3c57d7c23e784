"""metrics.jsonl holds valid lines only, whatever happened to the process or disk."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.logger import JSONLOutput, Logger


def refuse_constant(name):
    raise ValueError(f"not JSON: {name}")


def read(path):
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(x, parse_constant=refuse_constant) for x in text.splitlines()]


def scalars(step, **metrics):
    return [(step, name, np.array(value)) for name, value in metrics.items()]


def test_a_write_is_a_line(tmp_path):
    output = JSONLOutput(tmp_path / "new" / "folder")
    output(scalars(10, a=1.5, b=2))
    output(scalars(20, a=2.5))
    output.close()
    assert read(tmp_path / "new/folder/metrics.jsonl") == [
        {"step": 10, "a": 1.5, "b": 2},
        {"step": 20, "a": 2.5},
    ]


def test_lines_are_in_the_file_before_it_is_closed(tmp_path):
    output = JSONLOutput(tmp_path)
    output(scalars(10, a=1.5))
    assert read(tmp_path / "metrics.jsonl") == [{"step": 10, "a": 1.5}]
    output.close()


class TestRewind:
    def make(self, folder, steps):
        output = JSONLOutput(folder)
        for step in steps:
            output(scalars(step, a=step))
        return output

    @pytest.mark.parametrize(
        ("steps", "kept"),
        [
            ([1, 2, 3, 4], [1, 2]),
            ([1, 2], [1, 2]),
            ([3, 4], []),
            ([], []),
            ([1, 4, 2, 5, 1, 3, 2], [1, 2, 1, 2]),
        ],
        ids=["end", "nothing", "all", "empty", "of an earlier version"],
    )
    def test_later_steps_are_removed(self, tmp_path, steps, kept):
        self.make(tmp_path, steps).close()
        output = JSONLOutput(tmp_path)
        output.rewind(2)
        output(scalars(3, a=0.5))
        output.close()
        lines = [{"step": step, "a": step} for step in kept]
        assert read(tmp_path / "metrics.jsonl") == [*lines, {"step": 3, "a": 0.5}]
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]

    def test_other_lines_stay(self, tmp_path):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 9}\n{"note": 1}\n{"step": 8, "a": 1}\n')
        output = JSONLOutput(tmp_path)
        output.rewind(8)
        output.close()
        assert read(path) == [{"note": 1}, {"step": 8, "a": 1}]

    def test_the_logger_counts_environment_steps(self, tmp_path):
        self.make(tmp_path, [8, 12, 16]).close()
        with Logger(3, [JSONLOutput(tmp_path), print], multiplier=4) as logger:
            logger.rewind()
        assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [8, 12]

    def test_a_failure_is_reported(self, tmp_path, caplog):
        with Logger(0, [self.make(tmp_path, [1])]) as logger:
            (tmp_path / "metrics.jsonl").unlink()
            logger.rewind()
        assert "Logger output JSONLOutput failed to rewind" in caplog.text


def test_another_step_or_a_repeated_name_opens_another_line(tmp_path):
    output = JSONLOutput(tmp_path)
    output(scalars(1, a=1) + scalars(2, a=2, b=3) + scalars(2, a=4))
    output.close()
    assert read(tmp_path / "metrics.jsonl") == [
        {"step": 1, "a": 1},
        {"step": 2, "a": 2, "b": 3},
        {"step": 2, "a": 4},
    ]


def test_nan_and_infinities_are_null(tmp_path):
    output = JSONLOutput(tmp_path)
    output(scalars(1, a=np.nan, b=np.inf, c=np.float32(-np.inf), d=1.0))
    output.close()
    (line,) = read(tmp_path / "metrics.jsonl")
    assert line == {"step": 1, "a": None, "b": None, "c": None, "d": 1.0}


def test_only_scalars_are_written(tmp_path):
    output = JSONLOutput(tmp_path)
    output([(1, "text", "hello"), (1, "vector", np.zeros(3))])
    output([(2, "image", np.zeros((2, 2), np.uint8)), (2, "step", np.array(9))])
    output.close()
    assert read(tmp_path / "metrics.jsonl") == []


@pytest.mark.parametrize("pattern", ["episode/score", "episode/score$"])
def test_scores_have_training_episodes_only(tmp_path, pattern):
    with Logger(3, [JSONLOutput(tmp_path, "scores.jsonl", pattern)]) as logger:
        logger.add({"episode/score": 1.0, "episode/length": 2})
        logger.add({"eval_episode/score": 5.0, "episode/score_max": 7.0})
    assert read(tmp_path / "scores.jsonl") == [{"step": 3, "episode/score": 1.0}]


def test_every_score_between_two_writes_is_kept(tmp_path):
    with Logger(3, [JSONLOutput(tmp_path, "scores.jsonl", "episode/score")]) as logger:
        for score in (1.0, 2.0, 3.0):
            logger.add({"episode/score": score, "episode/length": 10})
    scores = [line["episode/score"] for line in read(tmp_path / "scores.jsonl")]
    assert scores == [1.0, 2.0, 3.0]


def test_a_later_run_appends(tmp_path):
    for step in (1, 2):
        output = JSONLOutput(tmp_path)
        output(scalars(step, a=step))
        output.close()
    assert [line["step"] for line in read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_whole_line_without_its_end_is_completed(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "a": 1}\n{"step": 2, "a": 2}')
    output = JSONLOutput(tmp_path)
    output(scalars(3, a=3))
    output.close()
    assert [line["step"] for line in read(path)] == [1, 2, 3]


@settings(max_examples=40)
@given(st.data())
def test_a_file_cut_anywhere_stays_valid_and_keeps_its_whole_lines(
    tmp_path_factory, data
):
    folder = tmp_path_factory.mktemp("cut")
    path = folder / "metrics.jsonl"
    lines = [json.dumps({"step": step, "loss": step / 7}) for step in range(5)]
    whole = ("\n".join(lines) + "\n").encode()
    cut = data.draw(st.integers(0, len(whole)))
    garbage = data.draw(st.sampled_from([b"", b"\0" * 100]))
    path.write_bytes(whole[:cut] + garbage)
    output = JSONLOutput(folder)
    output(scalars(99, loss=0.0))
    output.close()
    result = read(path)
    assert result[-1] == {"step": 99, "loss": 0.0}
    assert result[:-1] == [json.loads(line) for line in lines][: len(result) - 1]
    assert len(result) - 1 >= whole[:cut].count(b"\n")


def test_a_torn_line_longer_than_a_block_is_cut_off(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "' + "x" * 200_000)
    JSONLOutput(tmp_path).close()
    assert read(path) == [{"step": 1}]


def test_a_killed_process_leaves_a_file_that_the_next_run_continues(tmp_path):
    code = (
        "import sys, numpy as np\n"
        "from embodied.logger import JSONLOutput\n"
        f"output = JSONLOutput({str(tmp_path)!r})\n"
        "for step in range(10**9):\n"
        "    output([(step, f'name{i}', np.array(i)) for i in range(50)])\n"
        "    if step == 20: print('ready', flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    )
    with process:
        assert process.stdout.readline() == "ready\n"
        process.kill()
    output = JSONLOutput(tmp_path)
    output(scalars(-1, a=1))
    output.close()
    steps = [line["step"] for line in read(tmp_path / "metrics.jsonl")]
    assert steps == [*range(len(steps) - 1), -1]
    assert len(steps) > 20


@pytest.fixture
def no_room():
    """Limits the size of files, so that a write ends half-way as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))

    yield limit
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_ends_half_way_is_taken_back_and_raised(tmp_path, no_room):
    path = tmp_path / "metrics.jsonl"
    output = JSONLOutput(tmp_path)
    output(scalars(1, a=1))
    no_room(path.stat().st_size + 5)
    with pytest.raises(OSError) as caught:
        output(scalars(2, a=2))
    assert caught.value.errno == errno.EFBIG
    assert read(path) == [{"step": 1, "a": 1}]
    no_room(10_000)
    output(scalars(3, a=3))
    output.close()
    assert read(path) == [{"step": 1, "a": 1}, {"step": 3, "a": 3}]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_does_not_end_training(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    with Logger(0, [JSONLOutput(tmp_path)]) as logger:
        for _ in range(3):
            logger.add({"a": 1.0})
            logger.write()
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "JSONLOutput" in messages[0]
    assert "No space left on device" in messages[0]
