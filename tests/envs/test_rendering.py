"""The choice of MuJoCo's rendering backend, which is made before its import."""

from __future__ import annotations

import ctypes
import os
import sys

import pytest

from embodied.envs import rendering
from embodied.envs.rendering import RenderingUnavailable, choose_backend


@pytest.fixture
def headless(monkeypatch):
    """Fakes a headless Linux machine; returns a function that sets its libraries."""
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    # Set here, so that monkeypatch undoes what the code sets.
    monkeypatch.setenv("MUJOCO_GL", "")

    def install(*files):
        def load(name):
            if name not in files:
                raise OSError(f"{name}: no such file")

        monkeypatch.setattr(ctypes, "CDLL", load)
        return monkeypatch

    return install


def chosen():
    return os.environ.get("MUJOCO_GL")


@pytest.mark.parametrize("images", [True, False])
@pytest.mark.parametrize(
    ("files", "backend"),
    [
        (("libEGL.so.1", "libOSMesa.so.8"), "egl"),
        (("libEGL.so",), "egl"),
        (("libOSMesa.so.8",), "osmesa"),
    ],
)
def test_headless_machines_take_what_is_installed(headless, files, backend, images):
    headless(*files)
    choose_backend(images)
    assert chosen() == backend


def test_without_libraries_only_images_are_refused(headless):
    headless()
    with pytest.raises(RenderingUnavailable, match=r"neither.*apt install libegl1"):
        choose_backend(images=True)
    assert not chosen()
    choose_backend(images=False)
    assert chosen() == "disable"


@pytest.mark.parametrize(
    ("variable", "value"), [("MUJOCO_GL", "glfw"), ("DISPLAY", ":0")]
)
def test_a_choice_or_a_display_is_left_alone(headless, variable, value):
    headless("libEGL.so.1").setenv(variable, value)
    before = chosen()
    choose_backend(images=True)
    assert chosen() == before


def test_other_systems_are_left_alone(headless):
    headless().setattr(sys, "platform", "darwin")
    choose_backend(images=True)
    assert not chosen()


def test_failures_say_what_was_tried(headless):
    headless("libEGL.so.1").setenv("MUJOCO_GL", "egl")
    error = rendering.failure(RuntimeError("no device"))
    assert "MUJOCO_GL egl, got RuntimeError: no device" in str(error)
