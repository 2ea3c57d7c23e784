"""Encoded images and videos decode to the same pictures."""

from __future__ import annotations

import io
import subprocess

import numpy as np
import PIL.Image
import PIL.ImageSequence
import pytest

from embodied.logger import output
from embodied.logger.output import encode_gif, encode_png, encode_video


def decode(data, mode="RGB"):
    with PIL.Image.open(io.BytesIO(data)) as image:
        frames = PIL.ImageSequence.Iterator(image)
        return np.stack([np.asarray(frame.convert(mode)) for frame in frames])


def few_colours(shape, seed=0):
    """Random pixels of a palette that GIF can hold exactly."""
    return np.random.default_rng(seed).choice(np.uint8([0, 85, 170, 255]), shape)


def test_a_colour_video_survives():
    video = few_colours((5, 12, 16, 3))
    np.testing.assert_array_equal(decode(encode_gif(video, 15)), video)


def test_a_gray_video_survives():
    video = np.random.default_rng(0).integers(0, 256, (5, 12, 16, 1)).astype(np.uint8)
    decoded = decode(encode_gif(video, 15), "L")
    np.testing.assert_array_equal(decoded, video[..., 0])


def test_a_video_of_one_frame_survives():
    video = few_colours((1, 8, 8, 3))
    np.testing.assert_array_equal(decode(encode_gif(video, 15)), video)


def test_many_colours_come_out_close():
    ramp = np.linspace(0, 255, 64).astype(np.uint8)
    frame = np.stack([*np.meshgrid(ramp, ramp), np.full((64, 64), 128)], -1)
    decoded = decode(encode_gif(frame[None].astype(np.uint8), 15))
    assert np.abs(decoded[0].astype(int) - frame).mean() < 12


@pytest.mark.parametrize(("fps", "milliseconds"), [(10, 100), (15, 60), (1000, 20)])
def test_frames_last_as_long_as_the_rate_says(fps, milliseconds):
    data = encode_gif(few_colours((3, 8, 8, 3)), fps)
    with PIL.Image.open(io.BytesIO(data)) as image:
        assert image.n_frames == 3
        assert image.info["duration"] == milliseconds
        assert image.info["loop"] == 0


def test_equal_frames_keep_their_time():
    data = encode_gif(np.zeros((4, 8, 8, 3), np.uint8), 10)
    with PIL.Image.open(io.BytesIO(data)) as image:
        frames = PIL.ImageSequence.Iterator(image)
        assert sum(frame.info["duration"] for frame in frames) == 400


@pytest.mark.parametrize("shape", [(6, 8), (6, 8, 1), (6, 8, 3), (6, 8, 4)])
def test_an_image_survives(shape):
    image = few_colours(shape)
    with PIL.Image.open(io.BytesIO(encode_png(image))) as decoded:
        np.testing.assert_array_equal(np.asarray(decoded), image.squeeze())


def test_a_video_is_mp4_where_there_is_ffmpeg(tmp_path):
    pytest.importorskip("imageio_ffmpeg", reason="the extra video is not installed")
    ramp = np.linspace(0, 255, 30).astype(np.uint8)
    video = np.broadcast_to(ramp[:, None, None, None], (30, 32, 33, 1))
    kind, data = encode_video(video, 15)
    assert kind == "mp4"
    assert b"ftyp" in data[:16]
    path = tmp_path / "video.mp4"
    path.write_bytes(data)
    command = [output.find_ffmpeg(), "-loglevel", "error", "-i", path]
    command += ["-f", "rawvideo", "-pix_fmt", "gray", "-"]
    raw = subprocess.run(command, capture_output=True, check=True).stdout
    frames = np.frombuffer(raw, np.uint8).reshape(30, 32, 34)
    np.testing.assert_allclose(frames[:, 4:-4, 4:-4].mean((1, 2)), ramp, atol=6)


@pytest.mark.parametrize("program", [None, "/bin/false", "/nowhere/ffmpeg"])
def test_a_video_is_a_gif_without_ffmpeg_that_works(program, monkeypatch, caplog):
    monkeypatch.setattr(output, "find_ffmpeg", lambda: program)
    video = few_colours((3, 8, 8, 3))
    kind, data = encode_video(video, 15)
    assert kind == "gif"
    np.testing.assert_array_equal(decode(data), video)
    assert ("ffmpeg failed" in caplog.text) == (program is not None)
