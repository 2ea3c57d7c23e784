"""Figures that a process reports about its own usage of resources."""

from __future__ import annotations

import gc
import os
import time
import tracemalloc

import pytest
from waiting_testing import wait_until

from embodied.run.usage import NvidiaSmi, Usage

OFF = {"psutil": False, "nvsmi": False, "gputil": False, "malloc": False, "gc": False}

FAKE = """#!/bin/sh
echo "50, 1000, 4000, 60"
echo "100, 3000, 4000, 70"
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    def install(script):
        path = tmp_path / "nvidia-smi"
        path.write_text(script)
        path.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return install


def test_nothing_is_reported_unless_asked_for():
    assert Usage(OFF).result() == {}


def test_processor_and_memory_of_this_process():
    usage = Usage(OFF | {"psutil": True})
    end = time.process_time() + 0.2
    while time.process_time() < end:
        pass
    result = usage.result()
    assert 0 < result["psutil/proc_cpu_usage"] <= os.cpu_count() + 1
    assert 0 < result["psutil/proc_ram_gb"] < 1000
    assert result["psutil/proc_threads"] >= 1
    assert result["psutil/proc_files"] >= 3


def test_accelerators_together_and_each(nvidia_smi, tmp_path):
    nvidia_smi(f"{FAKE}echo >> {tmp_path}/asked\n")
    usage = Usage(OFF | {"nvsmi": True, "gputil": True})
    result = wait_until(lambda: len(x := usage.result()) == 9 and x)
    assert len((tmp_path / "asked").read_text()) == 1  # One query for both.
    assert result["nvsmi/compute_avg"] == 0.75
    assert result["nvsmi/compute_min"] == 0.5
    assert result["nvsmi/compute_max"] == 1.0
    assert result["nvsmi/memory_avg"] == 0.5
    assert result["nvsmi/temperature_max"] == 70
    assert result["gputil/gpu0_load"] == 0.5
    assert result["gputil/gpu1_memory"] == 0.75


@pytest.mark.parametrize("script", ["#!/bin/sh\nexit 9\n", "#!/bin/sh\necho [N/A]\n"])
def test_devices_that_do_not_tell_are_left_out(nvidia_smi, script):
    nvidia_smi(script)
    smi = NvidiaSmi()
    assert smi.rows() == []
    assert wait_until(lambda: not smi._asking)
    assert smi.rows() == []


@pytest.mark.parametrize(("every", "most"), [(1000.0, 1), (0.0, 9)])
def test_it_does_not_ask_more_often_than_told(nvidia_smi, tmp_path, every, most):
    nvidia_smi(f"{FAKE}echo >> {tmp_path}/asked\n")
    smi = NvidiaSmi(every)
    for _ in range(9):
        smi.rows()
        assert wait_until(lambda: not smi._asking)
    assert len((tmp_path / "asked").read_text()) == most
    assert smi.rows() == [[50, 1000, 4000, 60], [100, 3000, 4000, 70]]


def test_only_who_uses_accelerators_asks_for_them(nvidia_smi, tmp_path):
    nvidia_smi(f"{FAKE}echo >> {tmp_path}/asked\n")
    every = dict.fromkeys(OFF, True) | {"malloc": False}
    usage = Usage(every, accelerator=False)
    assert {name.split("/")[0] for name in usage.result()} == {"psutil", "gc"}
    assert not (tmp_path / "asked").exists()


def test_without_nvidia_smi_there_is_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Usage(OFF | {"nvsmi": True, "gputil": True}).result() == {}


def test_allocations_and_objects():
    usage = Usage(OFF | {"malloc": True, "gc": True})
    try:
        gc.collect()
        before = usage.result()
        kept = [[index] for index in range(100_000)]
        after = usage.result()
    finally:
        tracemalloc.stop()
    assert after["malloc/total_mb"] > before["malloc/total_mb"]
    assert __file__ in after["malloc/top"]
    assert after["gc/objects"] >= before["gc/objects"] + len(kept) // 2
