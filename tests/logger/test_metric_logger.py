"""Metrics reach every output, even if another output fails."""

from __future__ import annotations

import errno
import logging
import subprocess
import sys
import threading

import elements
import ml_dtypes
import numpy as np
import pytest

from embodied.logger import Logger


class Collector:
    """Keeps all summaries, or raises `error` if it is set."""

    def __init__(self):
        self.summaries = []
        self.error = None
        self.calls = []

    def __call__(self, summaries):
        self.calls.append("write")
        if self.error:
            raise self.error
        self.summaries += summaries

    def close(self):
        self.calls.append("close")


@pytest.fixture
def output():
    return Collector()


def value_of(output, name):
    values = [value for _, key, value in output.summaries if key == name]
    assert len(values) == 1
    return values[0]


class TestCollecting:
    def test_metrics_are_written_with_the_step_at_which_they_were_added(self, output):
        step = elements.Counter()
        logger = Logger(step, [output], multiplier=4)
        step.increment(10)
        logger.add({"a": 1.0})
        step.increment(5)
        logger.add({"b": 2})
        assert output.summaries == []
        logger.write()
        assert output.summaries == [(40, "a", 1.0), (60, "b", 2)]

    def test_the_step_may_be_a_plain_integer(self, output):
        with Logger(7, [output]) as logger:
            logger.add({"a": 1.0})
        assert output.summaries == [(7, "a", 1.0)]

    def test_prefixes_are_put_before_names(self, output):
        logger = Logger(0, [output])
        logger.add({"score": 1, "length": 2}, prefix="episode")
        logger.add({"plain": 3})
        logger.write()
        names = [name for _, name, _ in output.summaries]
        assert names == ["episode/score", "episode/length", "plain"]

    def test_a_write_without_metrics_does_not_reach_the_outputs(self, output):
        Logger(0, [output]).write()
        assert output.calls == []

    def test_every_write_has_only_what_is_new(self, output):
        logger = Logger(0, [output])
        logger.add({"a": 1.0})
        logger.write()
        logger.write()
        assert len(output.summaries) == 1

    def test_closing_writes_first_and_closes_all(self):
        outputs = [Collector(), Collector()]
        with Logger(0, outputs) as logger:
            logger.add({"a": 1.0})
        assert [output.calls for output in outputs] == [["write", "close"]] * 2

    def test_a_plain_function_can_be_an_output(self):
        summaries = []
        with Logger(0, [summaries.extend]) as logger:
            logger.add({"a": 1.0})
        assert summaries == [(0, "a", 1.0)]

    def test_threads_may_add_and_write_at_once_and_nothing_is_lost(self, output):
        logger = Logger(0, [output])

        def work(index):
            for count in range(200):
                logger.add({f"{index}/{count}": count})
                if count % 20 == 0:
                    logger.write()

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logger.close()
        names = [name for _, name, _ in output.summaries]
        assert len(names) == len(set(names)) == 800


class TestValues:
    @pytest.mark.parametrize(
        "value",
        [1, 1.5, True, np.float32(2), np.int64(3), np.array(4), ml_dtypes.bfloat16(5)],
    )
    def test_numbers_become_scalars(self, output, value):
        with Logger(0, [output]) as logger:
            logger.add({"x": value})
        scalar = value_of(output, "x")
        assert scalar.shape == ()
        assert scalar.dtype.kind in "iuf"
        assert scalar.item() == value

    @pytest.mark.parametrize(
        "value",
        [
            np.float32(1),
            np.arange(5),
            np.zeros((4, 6), np.uint8),
            np.zeros((4, 6, 1), np.uint8),
            np.zeros((4, 6, 4), np.uint8),
            np.zeros((2, 4, 6, 3), np.uint8),
        ],
    )
    def test_arrays_reach_the_outputs_as_they_are(self, output, value):
        with Logger(0, [output]) as logger:
            logger.add({"x": value})
        np.testing.assert_array_equal(value_of(output, "x"), value)

    def test_strings_are_text(self, output):
        with Logger(0, [output]) as logger:
            logger.add({"a": "hello"})
            logger.add({"b": "world"})
        assert output.summaries == [(0, "a", "hello"), (0, "b", "world")]

    def test_pixels_given_as_floats_become_bytes(self, output):
        image = np.array([[-1.0, 0.0, 0.5], [1.0, 2.0, np.nan]])
        with Logger(0, [output]) as logger:
            logger.add({"x": image})
        assert value_of(output, "x").tolist() == [[0, 0, 127], [255, 255, 0]]
        assert value_of(output, "x").dtype == np.uint8

    def test_arrays_are_copied_so_that_buffers_can_be_used_again(self, output):
        buffer = np.ones((2, 4, 4, 3), np.uint8)
        logger = Logger(0, [output])
        logger.add({"x": buffer})
        buffer[:] = 9
        logger.write()
        assert value_of(output, "x").max() == 1

    @pytest.mark.parametrize(
        ("value", "error"),
        [
            (None, TypeError),
            ({"nested": 1}, TypeError),
            ([[1], [2, 3]], TypeError),
            (np.array(["a", "b"]), TypeError),
            (np.zeros((4, 6), np.int32), TypeError),
            (np.zeros((4, 6, 5), np.uint8), ValueError),
            (np.zeros((2, 4, 6, 4), np.uint8), ValueError),
            (np.zeros((1, 2, 4, 6, 3), np.uint8), ValueError),
            (np.zeros(0), ValueError),
        ],
    )
    def test_what_cannot_be_logged_is_refused_by_name(self, output, value, error):
        logger = Logger(0, [output])
        with pytest.raises(error, match="'train/bad'"):
            logger.add({"good": 1.0, "bad": value}, prefix="train")
        logger.write()
        assert output.summaries == []

    def test_an_output_that_cannot_be_called_is_refused(self):
        with pytest.raises(TypeError, match="can be called"):
            Logger(0, ["metrics.jsonl"])


class TestFailingOutputs:
    def write(self, logger, times=1):
        for _ in range(times):
            logger.add({"x": 1.0})
            logger.write()

    def warnings(self, caplog):
        return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]

    def test_the_others_go_on_and_the_error_is_reported_once(self, caplog):
        bad, good = Collector(), Collector()
        bad.error = OSError(errno.ENOSPC, "No space left on device")
        self.write(Logger(0, [bad, good]), 3)
        assert len(good.summaries) == 3
        (message,) = self.warnings(caplog)
        assert "Collector failed to write" in message
        assert "No space left on device" in message

    def test_another_error_is_reported_too(self, output, caplog):
        logger = Logger(0, [output])
        for error in (errno.EIO, errno.ENOSPC):
            output.error = OSError(error, f"number {error}")
            self.write(logger, 2)
        assert len(self.warnings(caplog)) == 2

    def test_recovery_is_reported_with_the_number_of_failures(self, output, caplog):
        logger = Logger(0, [output])
        output.error = RuntimeError("gone")
        self.write(logger, 3)
        output.error = None
        self.write(logger, 2)
        messages = self.warnings(caplog)
        assert len(messages) == 2
        assert "works again after 3 failed writes" in messages[1]
        output.error = RuntimeError("gone")
        self.write(logger)
        assert len(self.warnings(caplog)) == 3

    def test_an_output_that_fails_to_close_does_not_keep_others_open(self, caplog):
        bad, good = Collector(), Collector()
        bad.close = lambda: 1 / 0
        Logger(0, [bad, good]).close()
        assert good.calls == ["close"]
        assert "failed to close" in self.warnings(caplog)[0]


def test_importing_the_logger_imports_none_of_the_libraries_behind_its_outputs():
    code = (
        "import sys, embodied.logger\n"
        "heavy = {'rich', 'tensorboardX', 'wandb', 'scope', 'PIL', 'jax'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "[]"
