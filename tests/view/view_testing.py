"""Runs, servers and browsers for tests of the view."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SHOTS = os.environ.get("VIEW_SCREENSHOTS")  # A folder, to keep pictures of pages.
# A run that starts at once, without JAX, and leaves the processors to the view.
QUICK = (
    *("--configs", "debug", "--random_agent", "True", "--script", "parallel"),
    *("--task", "calm_env:Reach", "--run.envs", "3", "--run.eval_envs", "0"),
    *("--run.log_every", "1", "--logger.outputs", "jsonl", "tensorboard"),
    *("--run.train_ratio", "0.1"),
)
# A run with a model that was never updated, and steps of a random policy.
DREAMER = """
import sys
import elements, numpy
from dreamerv3.main import load_config, make_agent, make_env, make_replay
from dreamerv3.cli.config import make_args
from dreamerv3.cli.logdir import preserve_config, prepare_logdir
from embodied.random_agent import RandomAgent
from embodied.run.saving import RunCheckpoint
from embodied.run.settings import RunSettings
config = load_config(sys.argv[1:])
with preserve_config(config.logdir):
    prepare_logdir(config)
    env, replay = make_env(config, 0), make_replay(config, "replay")
    agent = make_agent(config)
    spaces = {k: v for k, v in env.act_space.items() if k != "reset"}
    random = RandomAgent(env.obs_space, spaces)
    action, carry = {k: v.sample() for k, v in spaces.items()}, random.init_policy(1)
    last = True
    for _ in range(200):
        obs = env.step({**action, "reset": numpy.bool_(last)})
        last = bool(obs["is_last"])
        batch = {k: numpy.asarray(v)[None] for k, v in obs.items()}
        carry, chosen, _ = random.policy(carry, batch)
        action = {k: v[0] for k, v in chosen.items()}
        kept = {k: v for k, v in obs.items() if not k.startswith("log/")}
        replay.add({**kept, **action})
    settings, counter = RunSettings.from_args(make_args(config)), elements.Counter(200)
    assert RunCheckpoint(settings, counter, agent, {"replay": replay}).save()
"""


def make_dreamer(folder, *flags):
    """Writes the logdir of a run with a model to dream with, in another process."""
    given = ("--configs", "debug", "--task", "dummy_disc", "--replay_context", "0")
    command = [sys.executable, "-c", DREAMER, *given, "--logdir", folder, *flags]
    done = subprocess.run(
        list(map(str, command)), env=environment(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def environment():
    # Quick to compile and slow to run, for programs that run briefly.
    flags = "--xla_backend_optimization_level=0"
    path = os.pathsep.join([str(ROOT), *sys.path])
    return {**os.environ, "PYTHONPATH": path, "XLA_FLAGS": flags}


def program(*arguments):
    command = [sys.executable, "-m", "dreamerv3.main", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@contextlib.contextmanager
def running(*arguments):
    """Runs a program until the end of the block."""
    process = program(*arguments)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def view(*folders, flags=()):
    """Runs a view of some folders; yields its address."""
    with running("--script", "view", "--logdir", *folders, *flags) as process:
        line = process.stdout.readline()
        assert "The view is at" in line, line + process.stdout.read()
        yield line.rsplit(maxsplit=1)[-1]


def fetch(address, data=None, headers=None):
    """Status, headers and body of a request."""
    request = urllib.request.Request(address, data, headers or {})
    try:
        with urllib.request.urlopen(request, timeout=240) as reply:
            return reply.status, reply.headers, reply.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers, error.read()


def ask(address, body=None):
    """Returns the JSON of a response, whose status must be 200."""
    data = None if body is None else json.dumps(body).encode()
    status, _, content = fetch(address, data, {"Content-Type": "application/json"})
    assert status == 200, content
    return json.loads(content)


def write_rows(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_run(folder, task="dummy_disc", seed=0, rows=50):
    """Writes the files of an ended run, without running one."""
    config = (ROOT / "dreamerv3/configs.yaml").read_text()
    match = re.search(r"^defaults:\n(.*?)^\S", config, re.MULTILINE | re.DOTALL)
    lines = [line[2:] for line in match.group(1).splitlines()]
    text = "\n".join(lines) + "\n"
    text = re.sub(r"(?m)^task: .*", f"task: {task}", text)
    text = re.sub(r"(?m)^seed: .*", f"seed: {seed}", text)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(text)
    scores = [{"step": 10 * i, "episode/score": float(i)} for i in range(1, rows + 1)]
    write_rows(folder / "scores.jsonl", scores)
    metrics = [{"step": 10 * i, "train/loss": 1 / i} for i in range(1, rows + 1)]
    write_rows(folder / "metrics.jsonl", metrics)
    return folder


def write_videos(folder, *names):
    """Adds a video of two frames under each name, as runs write them."""
    from embodied.logger import TensorBoardOutput

    frames = np.zeros((2, 16, 24, 3), np.uint8)
    frames[1] = 255
    output = TensorBoardOutput(folder)
    output([(100, name, frames) for name in names])
    output.close()


def env_worker(process):
    """The id of a process that steps an environment of a run; None if there is none."""
    import psutil

    for child in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any("env-0" in part for part in child.cmdline()):
                return child.pid
    return None


def browser_missing():
    """Why there is no browser to test with; empty if there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed"
    for name in ("chromium", "chromedriver"):
        if shutil.which(name) is None:
            return f"{name} is not installed (Debian: apt install chromium-driver)"
    return ""


@contextlib.contextmanager
def browser(width=1280, height=900):
    """Debian's Chromium in headless mode; skips the test if it is missing."""
    if reason := browser_missing():
        pytest.skip(reason)
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for argument in (
        "--headless=new",
        "--no-sandbox",  # Chromium has none as root.
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--force-device-scale-factor=1",
        f"--window-size={width},{height}",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def find(driver, selector):
    return driver.find_elements("css selector", selector)


def ask_all(driver, selector, expression):
    """Evaluates all elements at once, since pages of live runs are redrawn."""
    script = f"return [...document.querySelectorAll(arguments[0])].map({expression})"
    return driver.execute_script(script, selector)


def texts(driver, selector):
    """The texts that elements show; empty for hidden elements."""
    shown = '(x) => x.checkVisibility() ? (x.innerText ?? x.textContent) : ""'
    return ask_all(driver, selector, shown)


def text(driver, selector):
    return " ".join(texts(driver, selector)).strip()


def loaded(driver, selector="main img"):
    """Whether there are images and all of them have loaded."""
    return all(ask_all(driver, selector, "(x) => x.naturalWidth") or [0])


def identity(address, name):
    runs = ask(f"{address}api/runs")
    return next(run["id"] for run in runs if run["name"].split("/")[-1] == name)


def drawn(driver, selector="canvas"):
    """Whether there is anything on a canvas."""
    script = """
const node = document.querySelector(arguments[0]);
if (!node || !node.width) return false;
const data = node.getContext("2d").getImageData(0, 0, node.width, node.height).data;
return data.some((value) => value > 0);
"""
    return driver.execute_script(script, selector)


def keep(driver, name, height=900):
    if SHOTS:
        driver.set_window_size(1280, height)
        time.sleep(1)  # For animations to finish.
        driver.save_screenshot(str(pathlib.Path(SHOTS) / f"{name}.png"))
        driver.set_window_size(1280, 900)
