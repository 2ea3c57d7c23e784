"""Devices and cores for runs, with stand-ins for NVIDIA's programs."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys

import psutil
import pytest
from waiting_testing import wait_until

from dreamerv3.cli.config import ConfigError, load_config
from dreamerv3.suite import accelerators
from dreamerv3.suite.accelerators import Slot, open_slots

CUDA = ("--jax.platform", "cuda", "--configs", "size12m")

# With -f, serves until its pipe folder has a file `quit`; otherwise, asks the service.
CONTROL = f"""#!{sys.executable}
import os, pathlib, sys, time
folder = pathlib.Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/nowhere"))
if sys.argv[1:] == ["-f"]:
    (folder / "control").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "all"))
    while not (folder / "quit").exists():
        time.sleep(0.02)
    sys.exit(0)
if not (folder / "control").exists():
    sys.exit("Cannot find MPS control daemon process")
if "quit" in sys.stdin.read():
    (folder / "quit").touch()
else:
    print("100.0")
"""


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """Returns a function that installs a program at the front of the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("CUDA_MPS_PIPE_DIRECTORY", raising=False)

    def install(name, text):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)

    return install


@pytest.fixture
def two_gpus(programs):
    lines = "\\n".join(f"GPU {index}: NVIDIA (UUID: GPU-{index})" for index in (0, 1))
    programs("nvidia-smi", f"#!/bin/sh\nprintf '{lines}\\n'\n")


def slots(*argv, **options):
    with open_slots(load_config([*CUDA, *argv], {}), **options) as found:
        return found


def test_without_devices_cores_are_shared_out(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(9)))
    assert slots("--jax.platform", "cpu") == [Slot("cpu")] * 2
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert slots("--jax.platform", "cpu") == [Slot("cpu")]
    assert slots("--jax.platform", "cpu", at_once=3) == [Slot("cpu")] * 3
    assert slots("--jax.platform", "tpu", at_once=3) == [Slot("tpu")]


@pytest.mark.usefixtures("two_gpus")
def test_devices_that_jax_cannot_use_are_left_alone(monkeypatch):
    monkeypatch.setattr(accelerators, "CUDA_PACKAGES", ("no_such_package",))
    assert accelerators.visible_gpus("auto") == []
    assert accelerators.visible_gpus("cpu") == []
    assert accelerators.visible_gpus("cuda") == ["0", "1"]
    monkeypatch.setattr(accelerators, "CUDA_PACKAGES", ("json",))
    assert accelerators.visible_gpus("auto") == ["0", "1"]


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("chosen", "found"),
    [("1", ["1"]), ("GPU-1, GPU-0", ["GPU-1", "GPU-0"]), ("0,-1,1", ["0"]), ("", [])],
)
def test_devices_that_are_hidden_are_left_alone(monkeypatch, chosen, found):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
    assert accelerators.visible_gpus("cuda") == found


@pytest.mark.usefixtures("two_gpus")
def test_without_the_service_each_device_has_one_run():
    found = slots(mps="off")
    assert [slot.environ for slot in found] == [
        {"CUDA_VISIBLE_DEVICES": "0"},
        {"CUDA_VISIBLE_DEVICES": "1"},
    ]
    assert all(slot.flags == () and slot.spacing == 0 for slot in found)


@pytest.mark.usefixtures("two_gpus")
def test_runs_on_several_devices_get_groups_of_them():
    (slot,) = slots("--jax.train_devices", "0", "1", "--batch_size", "16")
    assert slot.environ == {"CUDA_VISIBLE_DEVICES": "0,1"}
    with pytest.raises(ConfigError, match="at most the 2 devices that are visible"):
        slots("--jax.train_devices", "2", "3")


@pytest.mark.usefixtures("two_gpus")
def test_small_models_share_devices_through_a_service_of_ours(programs, monkeypatch):
    programs(accelerators.MPS_CONTROL, CONTROL)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with open_slots(load_config([*CUDA], {})) as found:
        assert len(found) == accelerators.RUNS_PER_DEVICE
        slot = found[0]
        assert slot.device == "gpu 1"
        assert slot.flags == ("--jax.prealloc", "False")
        assert slot.spacing > 0
        pipe = slot.environ["CUDA_MPS_PIPE_DIRECTORY"]
        served = pathlib.Path(pipe, "control")
        # The service sees all devices, so that they keep their numbers.
        assert served.read_text() == "all"
    assert not os.path.exists(pipe)


@pytest.mark.usefixtures("two_gpus")
def test_large_models_have_a_device_of_their_own(programs):
    programs(accelerators.MPS_CONTROL, CONTROL)
    assert len(slots("--configs", "size50m")) == 2
    assert len(slots("--configs", "size50m", at_once=2)) == 4


def test_a_service_of_somebody_else_is_used_and_stays(programs, tmp_path, monkeypatch):
    programs(accelerators.MPS_CONTROL, CONTROL)
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    (tmp_path / "control").touch()
    with accelerators.open_mps() as environ:
        assert environ == {}
    assert not (tmp_path / "quit").exists()


def test_a_service_that_does_not_start_is_done_without(programs, caplog):
    programs(accelerators.MPS_CONTROL, "#!/bin/sh\nexit 1\n")
    with accelerators.open_mps() as environ:
        assert environ is None
    assert "did not start" in caplog.text


def test_the_service_ends_with_a_body_that_fails(programs):
    programs(accelerators.MPS_CONTROL, CONTROL)
    before = children()  # Other tests of this process may have left some.
    with contextlib.suppress(ZeroDivisionError), accelerators.open_mps() as environ:
        assert environ and children() - before
        raise ZeroDivisionError
    wait_until(lambda: not children() - before)


def children():
    return {process.pid for process in psutil.Process().children(recursive=True)}
