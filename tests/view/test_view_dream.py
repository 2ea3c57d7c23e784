"""The dream: playing in the world model, from a moment of the replay or an episode."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import unittest.mock

import numpy as np
import pytest
from view_testing import (
    ask,
    browser,
    browser_missing,
    drawn,
    fetch,
    find,
    keep,
    make_dreamer,
    text,
    view,
    write_run,
)
from waiting_testing import wait_until

from dreamerv3.cli.task_origin import sign_task
from dreamerv3.view import dream
from dreamerv3.view.dream import Dream, NoDream, read_moment
from embodied.base import TaskError
from embodied.run.live import LiveFile

pytest.importorskip("starlette", reason="the extra `view` is not installed")
pytestmark = pytest.mark.timeout(240)
needs_browser = pytest.mark.skipif(
    bool(browser_missing()), reason=browser_missing() or "there"
)


@pytest.fixture(scope="module")
def address(dreamer):
    with view(dreamer, flags=("--view.sessions", "1")) as address:
        yield address


@pytest.fixture(scope="module")
def identity(address):
    (run,) = ask(f"{address}api/runs")
    return run["id"]


@pytest.fixture(scope="module")
def started(address, identity):
    """The first frame of the dream session that all tests share."""
    first = ask(f"{address}api/dream", {"run": identity, "moment": 0.3})
    yield first
    ask(f"{address}api/dream/{first['session']}/end", {})


@pytest.fixture
def session(address, started):
    """Starts a dream at a moment of the replay; returns a function that steps in it."""

    def step(do="step", **choice):
        return ask(step.address, {"do": do, **choice})

    step.address = f"{address}api/dream/{started['session']}"
    step.first = step(do="start", moment=0.3)
    return step


def refused(address, body):
    headers = {"Content-Type": "application/json"}
    status, _, content = fetch(address, json.dumps(body).encode(), headers)
    assert status >= 400, content
    return json.loads(content)["error"]


@pytest.fixture(scope="module")
def chromium():
    with browser() as driver:
        yield driver


@contextlib.contextmanager
def dreaming(driver, address, identity):
    """Begins a dream on its page; at the end the console must be empty."""
    driver.get(f"{address}#/dream/{identity}")
    wait_until(lambda: text(driver, "#begin"), "the page")
    find(driver, "#begin")[0].click()
    wait_until(lambda: "you play now" in text(driver, "#status"), "the dream", 120)
    yield
    driver.get(f"{address}#/runs")  # Leaving the page ends the dream.
    wait_until(lambda: text(driver, "tbody tr"), "the list of runs")
    assert [entry["message"] for entry in driver.get_log("browser")] == []


def at(driver):
    """The step of the dream that is shown."""
    script = "return Number(document.querySelector('[data-at]').dataset.at)"
    return driver.execute_script(script)


@needs_browser
@pytest.mark.parametrize(
    "state", [pytest.param("ended", marks=pytest.mark.slow), "live"]
)
def test_the_dream_answers_to_keys(chromium, address, identity, dreamer, state):
    live = LiveFile(dreamer, lambda: {"step": 200}, every=0.2)
    with live if state == "live" else contextlib.nullcontext():
        wait_until(lambda: ask(f"{address}api/runs")[0]["state"] == state, state)
        with dreaming(chromium, address, identity):
            _play(chromium)
    (dreamer / "live.json").unlink(missing_ok=True)
    (dreamer / "events.jsonl").unlink(missing_ok=True)


def _play(driver):
    from selenium.webdriver.common.keys import Keys

    assert at(driver) == 0 and drawn(driver, ".screens canvas")
    body = find(driver, "body")[0]
    body.send_keys("2")
    wait_until(lambda: at(driver) == 1, "a step by a key")
    assert "act_disc 1 ◂" in text(driver, ".side")
    body.send_keys(Keys.ARROW_LEFT)
    wait_until(lambda: at(driver) == 2, "a step by an arrow")
    find(driver, ".actions button")[3].click()
    wait_until(lambda: at(driver) == 3, "a step by a button")
    find(driver, "#play-policy")[0].click()
    wait_until(lambda: at(driver) > 6, "steps of the policy")
    find(driver, "#play-policy")[0].click()
    assert "Value" in text(driver, "#meters")
    keep(driver, "dream", 1000)


@needs_browser
@pytest.mark.slow
def test_actions_of_several_variables_have_keys_and_lists(chromium, tmp_path):
    make_dreamer(tmp_path / "run", "--task", "switches:Switches")
    with view(tmp_path) as address:
        (run,) = ask(f"{address}api/runs")
        with dreaming(chromium, address, run["id"]):
            assert len(find(chromium, ".variable select")) == 2
            body = find(chromium, "body")[0]
            body.send_keys("4")  # Increases the second variable.
            wait_until(lambda: at(chromium) == 1, "a step by a key")
            shown = text(chromium, ".side")
            assert "switch 0: 0 ◂" in shown and "switch 1: 1 ◂" in shown
            find(chromium, ".variable select")[0].send_keys("1")
            wait_until(lambda: at(chromium) == 2, "a step by a list")
            shown = text(chromium, ".side")
            assert "switch 0: 1 ◂" in shown and "switch 1: 1 ◂" in shown
            assert "switch 0: 2" not in shown and "switch 1: 2" in shown


def test_the_code_of_a_stranger_is_not_imported(tmp_path, monkeypatch):
    folder = write_run(tmp_path / "run", "this:Unknown")
    monkeypatch.setattr(dream, "load_model", unittest.mock.MagicMock())
    with pytest.raises(NoDream, match="names code"):
        Dream(folder).start({"source": "episode"})
    sign_task(folder, "this:Unknown")  # Now the code would be imported.
    with pytest.raises(TaskError, match="this"):
        Dream(folder).start({"source": "episode"})


def test_a_dream_that_nobody_uses_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(dream, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(dream, "PRIORITY", 0)
    ours, theirs = multiprocessing.Pipe()
    ours.send_bytes(json.dumps({"do": "start"}).encode())
    dream.answer_requests(str(tmp_path), theirs)  # Returns.
    assert "error" in json.loads(ours.recv_bytes()), "requests are answered before"


def test_moments_of_the_replay(dreamer):
    before, after = read_moment(dreamer, 0.5, 8)
    assert 1 <= len(before) <= 8 and len(before[0]["image"].shape) == 3
    assert not any(step["is_first"] for step in [*before[1:], *after])
    oldest, _ = read_moment(dreamer, 0.0, 8)
    assert oldest[0]["is_first"]
    newest, rest = read_moment(dreamer, 1.0, 8)
    assert rest and not np.array_equal(newest[-1]["image"], oldest[0]["image"])
    counts = [read_moment(dreamer, m, 1)[0][0]["count"] for m in (0.1, 0.2, 0.3)]
    assert len(set(map(float, counts))) == 3


def test_without_a_replay_there_is_a_reason(tmp_path):
    with pytest.raises(NoDream, match="saved yet"):
        read_moment(tmp_path, 0.5, 8)


def test_a_step_shows_what_the_model_makes_of_it(session):
    first = session.first
    (action,) = first["spaces"]["actions"]
    assert action["key"] == "act_disc"
    assert action["variables"] == [{"low": 0, "classes": 5}]
    assert first["at"] == 0 and {"dream", "truth"} <= set(first)
    image = first["dream"]["image"]
    assert (image["height"], image["width"]) == (64, 64) and image["pixels"]
    frame = session(action={"act_disc": 2})
    assert frame["at"] == 1 and frame["action"] == {"act_disc": 2}
    assert 0 <= frame["continues"] <= 1 and np.isfinite(frame["value"])
    (probs,) = frame["policy"]["act_disc"]["probs"]
    assert len(probs) == 5 and sum(probs) == pytest.approx(1, abs=1e-3)
    assert len(frame["dream"]["vector"]["vector"]) == 7
    assert session(policy=True)["at"] == 2


def test_the_truth_is_there_as_long_as_the_recorded_actions_are_taken(session):
    recorded = session(recorded=True)
    assert "truth" in recorded and recorded["true_reward"] is not None
    again = session(do="restart")
    assert again["at"] == 0 and again["truth"] == session.first["truth"]
    taken = recorded["action"]["act_disc"]
    other = session(action={"act_disc": (taken + 1) % 5})
    assert "truth" not in other
    assert "recorded" in refused(session.address, {"do": "step", "recorded": True})


def test_an_episode_is_played_beside_the_true_env(session):
    # Episodes have 100 steps: if one ends within the context, another one is played.
    first = session(do="start", source="episode", context=256)
    assert "truth" in first and not first["over"]
    begin = first["truth"]["count"]["vector"][0]
    frames = [session(policy=True) for _ in range(3)]
    counts = [frame["truth"]["count"]["vector"][0] for frame in frames]
    assert counts == [begin + 1, begin + 2, begin + 3]
    assert "cannot be played again" in refused(session.address, {"do": "restart"})


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"do": "fly"}, "do: expected start or step or restart"),
        ({"do": "step", "action": {"act_disc": "left"}}, "expected numbers"),
        ({"do": "step", "action": {"act_disc": [1, 2, 3]}}, "expected numbers"),
        ({"do": "start", "moment": 7}, "from 0 to 1"),
        ({"do": "start", "context": 10**9}, "context expected"),
    ],
)
def test_what_cannot_be_done_has_a_reason(session, body, reason):
    assert reason in refused(session.address, body)
    assert session(action={"act_disc": 10**6})["action"] == {"act_disc": 4}


def test_sessions_are_limited(session, address, identity):
    answer = refused(f"{address}api/dream", {"run": identity})
    assert "1 dreams at a time" in answer
    assert "has ended" in refused(f"{address}api/dream/none", {"do": "step"})
