"""Places where runs of a suite can run: devices, and how many runs share each.

In the process that runs the suite, which does not import JAX, since JAX would take the
devices' memory away from the runs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import importlib.util
import itertools
import logging
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping

import elements

from dreamerv3.cli.config import ConfigError
from embodied.workers import Process

# docs/parallel.md: four runs of size12m make 1.5 times the updates of one alone.
RUNS_PER_DEVICE = 4
LARGEST_SHARING = 3072  # Recurrent units of size25m; larger models fill a device.
CORES_PER_RUN = 4  # Of a run without an accelerator.
# A run compiles for about a minute at its start. Runs that start later on the same
# device find its programs, and their compiler measures kernels on a quieter device.
SPACING_SECONDS = 60.0

CUDA_PACKAGES = ("jax_cuda12_plugin", "jax_cuda13_plugin")
MPS_CONTROL = "nvidia-cuda-mps-control"
MPS_SECONDS = 20.0  # For the service to answer.
ASK_SECONDS = 10.0

logger = logging.getLogger("embodied.suite")


@dataclasses.dataclass(frozen=True)
class Slot:
    """A place where one run at a time can run.

    Attributes:
      device: name of the device, or of the devices.
      environ: environment variables that assign the device to a run.
      flags: flags that are applied before those of the run.
      spacing: seconds between the starts of two runs on this device.
    """

    device: str
    environ: Mapping[str, str] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    spacing: float = 0.0


@contextlib.contextmanager
def open_slots(
    config: elements.Config, at_once: str | int = "auto", mps: str = "auto"
) -> Iterator[list[Slot]]:
    """Finds the places for runs, and starts the service by which they share devices.

    Args:
      config: configuration of a run of the suite.
      at_once: runs on a device at a time, or 'auto'.
      mps: 'off' if the Multi-Process Service is not to be used.

    Raises:
      ConfigError: a run needs more devices than there are.
    """
    with contextlib.ExitStack() as stack:
        devices = visible_gpus(config.jax.platform)
        if not devices:
            yield _without_gpu(config.jax.platform, at_once)
            return
        needed = 1 + max(*config.jax.train_devices, *config.jax.policy_devices)
        groups = [
            devices[start : start + needed]
            for start in range(0, len(devices) - needed + 1, needed)
        ]
        if not groups:
            raise ConfigError(
                f"jax.train_devices: expected at most the {len(devices)} devices that "
                f"are visible, got indices up to {needed - 1}."
            )
        service: Mapping[str, str] | None = None
        wanted = default_runs(config) if at_once == "auto" else int(at_once)
        if wanted > 1 and mps == "auto":
            service = stack.enter_context(open_mps())
        if wanted > 1 and service is None:
            if at_once == "auto":
                wanted = 1
            else:
                logger.warning(
                    "Runs share devices in turns, which is slower than through the "
                    "Multi-Process Service."
                )
        yield _shared(groups, wanted, service or {})


def _shared(
    groups: list[list[str]], runs: int, service: Mapping[str, str]
) -> list[Slot]:
    """Returns the slots, the first of every device before the second of any."""
    slots = [
        Slot(
            device=f"gpu {','.join(group)}",
            environ={"CUDA_VISIBLE_DEVICES": ",".join(group), **service},
            flags=("--jax.prealloc", "False") if runs > 1 else (),
            spacing=SPACING_SECONDS if runs > 1 else 0.0,
        )
        for group in groups
    ]
    return slots * runs


def default_runs(config: elements.Config) -> int:
    """Returns how many runs of a configuration pay off on one device."""
    several = len({*config.jax.train_devices, *config.jax.policy_devices}) > 1
    large = config.agent.dyn.rssm.deter > LARGEST_SHARING
    return 1 if several or large else RUNS_PER_DEVICE


def _without_gpu(platform: str, at_once: str | int) -> list[Slot]:
    if platform == "tpu" or (platform == "auto" and _has_tpu()):
        return [Slot("tpu")]
    cores = len(os.sched_getaffinity(0))
    runs = max(1, cores // CORES_PER_RUN) if at_once == "auto" else int(at_once)
    return [Slot("cpu")] * runs


def visible_gpus(platform: str) -> list[str]:
    """Returns the NVIDIA devices that JAX would use, as CUDA_VISIBLE_DEVICES has them.

    Args:
      platform: value of `jax.platform`; `auto` needs JAX's CUDA plugin installed.
    """
    installed = any(importlib.util.find_spec(name) for name in CUDA_PACKAGES)
    if platform not in ("auto", "cuda") or (platform == "auto" and not installed):
        return []
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    try:
        answer = subprocess.run(
            [command, "-L"], capture_output=True, text=True, timeout=ASK_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [line for line in answer.stdout.splitlines() if line.startswith("GPU ")]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not found or chosen is None:
        return [str(index) for index in range(len(found))]
    names = [name.strip() for name in chosen.split(",")]
    # CUDA ignores all names from the first invalid one on.
    return list(itertools.takewhile(lambda name: name not in ("", "-1"), names))


def _has_tpu() -> bool:
    nodes = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(nodes) and importlib.util.find_spec("libtpu") is not None


# NVIDIA's Multi-Process Service, through which programs use a device at the same time.


@contextlib.contextmanager
def open_mps() -> Iterator[dict[str, str] | None]:
    """Starts the Multi-Process Service unless it is running; ends it after the body.

    Yields:
      Environment variables for the programs that are to use it; None if there is no
      service.
    """
    control = shutil.which(MPS_CONTROL)
    if control is None:
        logger.info("%s is not installed: one run at a time on a device.", MPS_CONTROL)
        yield None
        return
    if _answers(control, {}):
        yield {}  # A service that somebody else has started, and that keeps running.
        return
    with tempfile.TemporaryDirectory(prefix="mps-") as folder:
        environ = {
            "CUDA_MPS_PIPE_DIRECTORY": os.path.join(folder, "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": os.path.join(folder, "log"),
        }
        for path in environ.values():
            os.mkdir(path)
        # In the foreground of a child process, so that it ends with this process even
        # if this process is killed.
        with Process(_serve_mps, control, name="mps", env=environ) as process:
            deadline = time.monotonic() + MPS_SECONDS
            answers = False
            while process.running and not answers and time.monotonic() < deadline:
                answers = _answers(control, environ)
                process.join(0.0 if answers else 0.2)
            if not answers:
                logger.warning("The Multi-Process Service did not start.")
            try:
                yield environ if answers else None
            finally:
                _ask(control, "quit", environ)
                process.join(ASK_SECONDS if answers else 0.0)


def _serve_mps(control: str) -> None:
    # Devices that were chosen for this process would be numbered anew in the service.
    environ = {k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}
    subprocess.run([control, "-f"], env=environ, stdout=subprocess.DEVNULL, check=True)


def _answers(control: str, environ: Mapping[str, str]) -> bool:
    """Returns whether a service runs; it answers this question with a number."""
    answer = _ask(control, "get_default_active_thread_percentage", environ)
    return any(character.isdigit() for character in answer)


def _ask(control: str, question: str, environ: Mapping[str, str]) -> str:
    """Returns the answer of the service to a line, or an empty text without one."""
    try:
        answer = subprocess.run(
            [control],
            input=f"{question}\n",
            env={**os.environ, **environ},
            capture_output=True,
            text=True,
            timeout=ASK_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""
