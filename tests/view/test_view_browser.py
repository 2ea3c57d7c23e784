"""The pages in a real browser: a live run, a finished one, and the dream."""

from __future__ import annotations

import json
import os
import signal

import pytest
from view_testing import (
    QUICK,
    ROOT,
    browser,
    browser_missing,
    drawn,
    env_worker,
    fetch,
    find,
    identity,
    keep,
    loaded,
    program,
    running,
    text,
    texts,
    view,
    write_run,
    write_videos,
)
from waiting_testing import wait_until

pytest.importorskip("starlette", reason="the extra `view` is not installed")
pytestmark = [
    pytest.mark.skipif(bool(browser_missing()), reason=browser_missing() or "there"),
    pytest.mark.timeout(180),
]

NASTY = "train/<img src=x onerror=document.title='harm'>../../../etc"
ROLLOUT = ("--configs", "debug", "--random_agent", "True", "--script", "rollout")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    for seed in range(3):
        finished = write_run(folder / f"finished{seed}", "atari100k_boxing", seed)
    metrics = [{"step": 10 * i, NASTY: i, "train/loss": 1 / i} for i in range(1, 9)]
    with (finished / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in metrics)
    events = [{"time": 1e9 + i, "kind": "save", "text": NASTY} for i in range(5)]
    (finished / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    write_videos(finished, NASTY, "report/openloop/image")
    program(*ROLLOUT, "--run.steps", 400, "--logdir", folder / "rollout").communicate()
    return folder


@pytest.fixture(scope="module")
def live(folder):
    """The process of a live run without JAX."""
    with running(*QUICK, "--logdir", folder / "live") as process:
        wait_until((folder / "live/scores.jsonl").exists, "the first score")
        yield process


@pytest.fixture(scope="module")
def address(folder, live):
    with view(folder) as address:
        yield address


@pytest.fixture(scope="module")
def chromium(address):
    with browser() as driver:
        yield driver


@pytest.fixture
def page(chromium, address):
    """Returns a function that opens a page; at the end the console must be empty."""
    chromium.get("about:blank")

    def go(path, wait=""):
        chromium.get("about:blank")
        chromium.get(f"{address}#/{path}")
        if wait:
            wait_until(lambda: text(chromium, wait), f"{wait} of {path}")
        return chromium

    yield go
    entries = chromium.get_log("browser")
    assert [entry["message"] for entry in entries] == []
    assert chromium.title != "harm"


def test_all_runs_and_seeds_as_a_band(page):
    driver = page("runs", "tbody tr")
    wait_until(lambda: "5 runs" in text(driver, "[role=status]"), "all runs")
    assert "live" in text(driver, "tbody .state.live")
    boxes = [
        box
        for box in find(driver, "tbody input")
        if "finished" in box.get_attribute("aria-label")
    ]
    assert len(boxes) == 3
    for box in boxes:
        box.click()
    wait_until(lambda: drawn(driver, ".chart canvas"), "the chart that compares")
    label = find(driver, ".chart canvas")[0].get_attribute
    wait_until(lambda: "3 seeds" in label("aria-label"), "the band of seeds")
    keep(driver, "runs")


def test_a_live_run_shows_new_scores_without_a_reload(page, address, folder):
    run = identity(address, "live")
    driver = page(f"run/{run}", "#state")
    wait_until(lambda: text(driver, "#state") == "live", "the state")
    driver.execute_script("window.same = true")
    wait_until(lambda: "steps/s" in text(driver, "#box-env"), "the rate of the envs")
    wait_until(lambda: drawn(driver, ".chart.large canvas"), "the curve of scores")
    label = find(driver, ".chart.large canvas")[0].get_attribute
    before = label("aria-label")
    wait_until(lambda: label("aria-label") != before, "a new score", seconds=20)
    assert driver.execute_script("return window.same")


def test_a_new_score_is_there_at_once(page, address, folder):
    driver = page(f"run/{identity(address, 'finished1')}", "#score")
    before = int(text(driver, "#score"))
    score, step = before + 27, 460 + before  # Also new if this is tried again.
    with (folder / "finished1/scores.jsonl").open("a") as file:
        file.write(f'{{"step": {step}, "episode/score": {score}.0}}\n')
    wait_until(
        lambda: text(driver, "#score") == f"{score}", "the new score", seconds=20
    )
    label = find(driver, ".chart.large canvas")[0].get_attribute
    told = f"{score} at step {step}"
    wait_until(lambda: told in label("aria-label"), "the curve", seconds=20)


def test_hops_are_of_the_last_seconds_however_seldom_is_logged(page, address, live):
    driver = page(f"run/{identity(address, 'live')}", "#box-env")
    hops = {hop.get_attribute("aria-label"): hop for hop in find(driver, ".hop")}
    assert len(hops) == 6
    act = hops["act, action, Environments to Actor"]
    wait_until(lambda: "calls/s" in act.text and "queue" in act.text, "the figures")
    assert all(part in act.text for part in ("/s · ", "ms · queue"))
    moving = (
        "return [...document.querySelectorAll('.wire')].map((x) => x.dataset.speed)"
    )
    wait_until(lambda: int(driver.execute_script(moving)[0]) > 0, "calls on the line")
    shown = json.loads(fetch(f"{address}api/run/{identity(address, 'live')}")[2])
    assert shown["live"]["hops"]["server/actor"]["calls"] > 0


def test_a_killed_worker_is_seen_in_the_strip_and_in_its_box(page, address, live):
    driver = page(f"run/{identity(address, 'live')}", "#box-env")
    wait_until(lambda: "restarts" in text(driver, "#box-env"), "the state of workers")
    assert "0 restarts" in text(driver, "#box-env")
    os.kill(wait_until(lambda: env_worker(live), "the worker"), signal.SIGKILL)
    wait_until(lambda: "env-0 is restarted" in text(driver, "#events"), "the event")
    wait_until(
        lambda: "1 restart" in text(driver, "#box-env"), "the restart in the box"
    )
    assert "restart" in text(driver, "#events .kind.restart")
    assert drawn(driver, ".strip canvas")


def test_a_finished_run_with_names_that_would_harm(page, address):
    driver = page(f"run/{identity(address, 'finished2')}", "#state")
    wait_until(lambda: text(driver, "#state") == "ended", "the state")
    label = find(driver, ".chart.large canvas")[0].get_attribute("aria-label")
    assert "published" in label
    search = find(driver, "#search")[0]
    search.send_keys("onerror")
    wait_until(lambda: NASTY in text(driver, ".charts h3"), "the metric of that name")
    assert NASTY in text(driver, "#events")
    assert not find(driver, "main img")
    assert "atari100k_boxing" in text(driver, "table[aria-label^=Keys]")


def test_videos_of_a_finished_run(page, address):
    driver = page(f"videos/{identity(address, 'finished2')}", "figure")
    assert len(find(driver, "figure")) == 2 and "error" in text(driver, "section")
    assert NASTY in text(driver, "section h2")
    wait_until(lambda: loaded(driver), "the pictures")
    assert "still" not in find(driver, "main img")[0].get_attribute("src")
    find(driver, "figure button")[0].click()
    assert "still" in find(driver, "main img")[0].get_attribute("src")
    wait_until(lambda: loaded(driver), "the picture")
    find(driver, "select option")[1].click()
    wait_until(lambda: NASTY not in text(driver, "section h2"), "one name alone")


def test_videos_of_a_live_run_come_by_themselves(page, address, live):
    driver = page(f"videos/{identity(address, 'live')}", "figure")
    assert "epstats/policy_image" in text(driver, "section h2")
    first = texts(driver, "figcaption")[0]
    wait_until(lambda: texts(driver, "figcaption")[0] != first, "the next episode")
    wait_until(lambda: loaded(driver), "its picture")


def test_who_wants_less_motion_gets_pictures(page, address, chromium):
    def emulate(value):
        features = [{"name": "prefers-reduced-motion", "value": value}]
        chromium.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    emulate("reduce")
    try:
        driver = page(f"videos/{identity(address, 'finished2')}", "figure")
        sources = [x.get_attribute("src") for x in find(driver, "main img")]
        assert all("still" in source for source in sources)
        assert text(driver, "figure button").startswith("Play")
        page(f"run/{identity(address, 'live')}", "#box-env")
        script = (
            "return getComputedStyle(document.querySelector('.wire'), '::before')"
            ".animationName"
        )
        assert driver.execute_script(script) == "none"
    finally:
        emulate("no-preference")


def test_a_folder_of_a_rollout_is_shown_calmly(page, address):
    run = identity(address, "rollout")
    driver = page(f"run/{run}", "#state")
    wait_until(lambda: text(driver, "#state") == "ended", "the state")
    wait_until(lambda: drawn(driver, ".chart.large canvas"), "its scores")
    assert "nothing about its roles" in text(driver, "#system-line")
    assert not find(driver, ".system")[0].is_displayed()
    page(f"videos/{run}", "main h1")
    page(f"dream/{run}", "#begin")


def test_zoom_and_smoothing_by_keyboard(page, address):
    driver = page(f"run/{identity(address, 'finished0')}", "#state")
    chart = find(driver, ".chart.large canvas")[0]
    wait_until(lambda: "50 at" in chart.get_attribute("aria-label"), "the curve")
    chart.send_keys("+")
    wait_until(lambda: "50 at" not in chart.get_attribute("aria-label"), "the zoom")
    chart.send_keys("0")
    wait_until(lambda: "50 at" in chart.get_attribute("aria-label"), "the whole curve")
    from selenium.webdriver.common.keys import Keys

    find(driver, "input[type=range]")[0].send_keys(Keys.ARROW_RIGHT * 3)
    wait_until(lambda: "46.5 at" in chart.get_attribute("aria-label"), "the mean of 8")
    chart.send_keys(Keys.ARROW_RIGHT)
    wait_until(lambda: "step" in text(driver, ".chart.large .reading"), "the reading")


def test_pages_are_readable_on_narrow_and_wide_screens(page, address, chromium):
    run = identity(address, "finished2")
    seen = {"runs": "tbody tr", f"run/{run}": "#state"}
    seen |= {f"videos/{run}": "figure", f"dream/{run}": "#begin"}
    seen |= {f"run/{identity(address, 'live')}": "#box-env"}
    script = "return document.documentElement.scrollWidth - window.innerWidth"
    try:
        for path, shown in seen.items():
            for width in (400, 1280):
                chromium.set_window_size(width, 800)
                if width == 400:
                    page(path, shown)
                assert chromium.execute_script(script) <= 0, (path, width)
    finally:
        chromium.set_window_size(1280, 900)


def test_dark_and_light(page):
    driver = page("runs", "tbody tr")
    script = "return getComputedStyle(document.body).backgroundColor"
    before = driver.execute_script(script)
    find(driver, "#theme")[0].click()
    assert driver.execute_script(script) != before


def test_everything_that_can_be_used_has_a_name(page, address):
    driver = page(f"run/{identity(address, 'live')}", "#state")
    script = """
return [...document.querySelectorAll("button, input, select, canvas, a, img")]
  .filter((node) => !(node.getAttribute("aria-label") || node.textContent.trim()
    || node.closest("label") || node.alt)).map((node) => node.outerHTML)
"""
    assert driver.execute_script(script) == []


def test_without_the_token_there_is_nothing(chromium, address):
    chromium.get(address.rsplit("/", 2)[0] + "/")
    assert "token" in chromium.page_source and "canvas" not in chromium.page_source
    chromium.get_log("browser")  # Clears the entry about the refusal.


def test_screenshots_are_in_the_documents():
    for name in ("view-run", "view-dream", "view-runs"):
        assert (ROOT / "docs/images" / f"{name}.png").is_file()
