"""Event files hold the logged metrics in TensorBoard's format."""

from __future__ import annotations

import io
import struct

import numpy as np
import PIL.Image
import pytest
from elements import Counter
from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event, SessionLog
from waiting_testing import wait_until

from embodied.logger import Logger, TensorBoardOutput


def masked_crc(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def read(folder):
    """Returns (step, value protobuf) of all event files, checking their checksums.

    As in TensorBoard, the start of a session hides earlier events from its step on.
    """
    result = []
    paths = folder.glob("events.out.tfevents.*")
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns):
        file = io.BytesIO(path.read_bytes())
        while header := file.read(12):
            assert masked_crc(header[:8]) == struct.unpack("<I", header[8:])[0]
            data = file.read(struct.unpack("<Q", header[:8])[0])
            assert masked_crc(data) == struct.unpack("<I", file.read(4))[0]
            event = Event.FromString(data)
            if event.session_log.status == SessionLog.START:
                result = [entry for entry in result if entry[0] < event.step]
            result += [(event.step, value) for value in event.summary.value]
    return result


def log(folder, step=5, fps=10, pattern=".*", **metrics):
    output = TensorBoardOutput(folder, fps, pattern)
    with Logger(step, [output]) as logger:
        logger.add(metrics)
    return read(folder)


def test_a_continued_run_hides_the_steps_that_it_makes_again(tmp_path):
    for step in (1, 2, 3):
        log(tmp_path, step, x=0.0)
    output = TensorBoardOutput(tmp_path)
    step = Counter(2)
    with Logger(step, [output]) as logger:
        logger.rewind()
        for _ in range(3):
            step.increment()
            logger.add({"x": 1.0})
    found = [(step, value.simple_value) for step, value in read(tmp_path)]
    assert found == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0), (5, 1.0)]


def test_scalars(tmp_path):
    (step, value), (_, other) = log(tmp_path / "new", a=1.5, b=np.int32(3))
    assert (step, value.tag, value.simple_value) == (5, "a", 1.5)
    assert (other.tag, other.simple_value) == ("b", 3.0)


def test_vectors_are_histograms_of_their_finite_values(tmp_path):
    vector = np.float32([1, 2, 2, 3, np.nan, np.inf])
    ((_, value),) = log(tmp_path, x=vector)
    assert value.histo.num == 4
    assert value.histo.sum == 8
    assert (value.histo.min, value.histo.max) == (1, 3)
    assert sum(value.histo.bucket) == 4


@pytest.mark.parametrize("vector", [np.zeros(5), np.arange(3), np.array([1e30, -1e30])])
def test_any_vector_of_numbers_can_be_shown(tmp_path, vector):
    ((_, value),) = log(tmp_path, x=vector)
    assert sum(value.histo.bucket) == len(vector)


def test_a_vector_without_finite_values_is_left_out(tmp_path):
    ((_, value),) = log(tmp_path, x=np.array([np.nan]), y=1.0)
    assert value.tag == "y"


def test_images(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (6, 8, 3)).astype(np.uint8)
    ((_, value),) = log(tmp_path, x=pixels)
    image = value.image
    assert (image.height, image.width, image.colorspace) == (6, 8, 3)
    decoded = PIL.Image.open(io.BytesIO(image.encoded_image_string))
    np.testing.assert_array_equal(np.asarray(decoded), pixels)


def test_videos_are_gifs_in_image_summaries(tmp_path):
    video = np.stack([np.full((6, 8, 3), 60 * i, np.uint8) for i in range(4)])
    ((_, value),) = log(tmp_path, x=video)
    assert value.tag == "x"
    assert (value.image.height, value.image.width) == (6, 8)
    decoded = PIL.Image.open(io.BytesIO(value.image.encoded_image_string))
    assert decoded.format == "GIF"
    assert decoded.n_frames == 4
    assert decoded.info["duration"] == 100


def test_text(tmp_path):
    ((_, value),) = log(tmp_path, x="hello")
    assert value.tensor.string_val[0] == b"hello"
    assert value.metadata.plugin_data.plugin_name == "text"


def test_only_names_that_match_wholly_are_written(tmp_path):
    values = log(tmp_path, pattern="train/.*", **{"train/a": 1.0, "pretrain/a": 2.0})
    assert [value.tag for _, value in values] == ["train/a"]


def test_a_run_that_restarts_within_a_second_keeps_its_events(tmp_path):
    for step in range(3):
        values = log(tmp_path, step=step, a=1.0)
    assert sorted(step for step, _ in values) == [0, 1, 2]


def test_events_reach_the_file_before_the_end(tmp_path):
    logger = Logger(1, [TensorBoardOutput(tmp_path)])
    logger.add({"a": 1.0})
    logger.write()
    wait_until(lambda: list(tmp_path.iterdir()) and read(tmp_path))
    logger.close()


def test_without_metrics_there_is_no_file(tmp_path):
    TensorBoardOutput(tmp_path / "new").close()
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_made_is_reported_and_training_goes_on(
    tmp_path, caplog
):
    (tmp_path / "file").write_text("in the way")
    logger = Logger(1, [TensorBoardOutput(tmp_path / "file" / "logdir")])
    logger.add({"a": 1.0})
    logger.close()
    assert "TensorBoardOutput failed" in caplog.text
