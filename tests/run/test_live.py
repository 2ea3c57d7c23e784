"""`live.json` and `events.jsonl`: whole, in time, and no burden on the run."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import threading

import pytest
from waiting_testing import wait_until

from embodied.checkpoint import Checkpoint
from embodied.run import live
from embodied.run.live import (
    EVENTS,
    LIVE,
    LiveFile,
    Rate,
    note_event,
    record_events,
    record_run,
)

log = logging.getLogger("embodied.run")


def events(logdir):
    return [json.loads(line) for line in (logdir / EVENTS).read_text().splitlines()]


def people(logdir):
    """Returns kind and text of the events for people, which steps are not."""
    found = [event for event in events(logdir) if event["kind"] != live.STEP]
    return [(event["kind"], event["text"]) for event in found]


def test_the_live_file_is_whole_whenever_it_is_read(tmp_path):
    count = 0

    def collect():
        nonlocal count
        count += 1
        return {"step": count, "filler": "x" * 100_000, "bad": float("nan")}

    with LiveFile(tmp_path, collect, every=0.001):
        seen = set()
        while len(seen) < 20:
            if (tmp_path / LIVE).exists():
                content = json.loads((tmp_path / LIVE).read_text())
                assert content["state"] == "live" and content["bad"] is None
                assert len(content["filler"]) == 100_000
                seen.add(content["step"])
    assert json.loads((tmp_path / LIVE).read_text())["state"] == "ended"
    assert [path.name for path in tmp_path.iterdir() if path.name[0] == "."] == []


def test_steps_are_noted_with_their_time(tmp_path):
    with LiveFile(tmp_path, lambda: {"step": 7}):
        pass
    (event, *_) = events(tmp_path)
    assert event["kind"] == live.STEP and event["step"] == 7 and event["time"] > 1e9


def test_a_folder_that_is_gone_does_not_harm_the_run(tmp_path):
    folder = tmp_path / "gone"
    folder.mkdir()
    with record_events(folder), LiveFile(folder, lambda: {"step": 1}, every=0.01):
        wait_until((folder / LIVE).exists)
        for _ in range(100):  # The thread may write meanwhile.
            subprocess.run(["rm", "-rf", str(folder)], check=False)
            if not folder.exists():
                break
        note_event(live.SAVE, "Nobody sees it.")
        log.warning("Nor this.")


def test_what_a_killed_writer_has_left_goes_at_the_next_start(tmp_path, monkeypatch):
    def killed(*args):
        raise SystemExit

    monkeypatch.setattr(live.os, "replace", killed)
    with pytest.raises(SystemExit):
        LiveFile(tmp_path, dict)._write("live")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == 1
    Checkpoint(tmp_path).clean()
    assert not list(tmp_path.glob(".*"))


def test_a_disk_that_hangs_does_not_hold_up_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "END_SECONDS", 0.05)
    began, hung = threading.Event(), threading.Event()

    def collect():
        began.set()
        assert hung.wait(30)
        return {}

    try:
        with LiveFile(tmp_path, collect):
            assert began.wait(30)
        assert not (tmp_path / "live.json").exists()
    finally:
        hung.set()


def test_after_recording_events_are_as_little_to_log_as_before(tmp_path):
    logger = logging.getLogger("embodied.events")
    before = logger.isEnabledFor(logging.INFO)
    with record_events(tmp_path):
        assert logger.isEnabledFor(logging.INFO)
    assert logger.isEnabledFor(logging.INFO) == before


def test_events_and_warnings_are_recorded_and_not_printed(tmp_path, capsys):
    with record_events(tmp_path), record_events(tmp_path):
        note_event(live.SAVE, "Saved step 3.", step=3)
        log.info("Not a warning.")
        log.warning("Slow.")
        log.error("Broken.")
        extra = {"event": {"kind": live.RESTART, "role": "env-1"}}
        log.warning("Role %s is restarted.", "env-1", extra=extra)
    note_event(live.SAVE, "After the end.")
    assert people(tmp_path) == [
        (live.SAVE, "Saved step 3."),
        (live.WARNING, "Slow."),
        (live.FAULT, "Broken."),
        (live.RESTART, "Role env-1 is restarted."),
    ]
    assert events(tmp_path)[0]["step"] == 3
    assert events(tmp_path)[-1]["role"] == "env-1"
    assert "Saved" not in "".join(capsys.readouterr())


def test_the_beginning_and_the_end_are_events(tmp_path):
    with record_run(tmp_path, "A run"):
        pass
    with pytest.raises(ValueError, match="wrong"), record_run(tmp_path, "A run"):
        raise ValueError("wrong")
    kinds = [kind for kind, _ in people(tmp_path)]
    assert kinds == [live.START, live.END, live.START, live.FAILED]
    assert people(tmp_path)[-1][1] == "ValueError: wrong"


def test_a_flood_of_warnings_does_not_fill_the_disk(tmp_path):
    with record_events(tmp_path):
        for index in range(1000):
            log.warning("Warning %d", index)
        note_event(live.SAVE, "Saved.")
    assert len(events(tmp_path)) == live.MOST_PER_MINUTE + 1


def test_lines_of_several_processes_stay_whole(tmp_path):
    code = """
import sys
from embodied.run.live import note_event, record_events
with record_events(sys.argv[1]):
    for index in range(200):
        note_event("save", sys.argv[2] * 400, index=index)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    programs = [subprocess.Popen([*command, letter]) for letter in "abc"]
    assert [program.wait(60) for program in programs] == [0, 0, 0]
    found = events(tmp_path)
    assert len(found) == 600
    assert {event["text"] for event in found} == {letter * 400 for letter in "abc"}


def test_nothing_is_made_where_there_is_no_folder(tmp_path):
    with record_events(tmp_path / "none"):
        note_event(live.SAVE, "Saved.")
    assert not (tmp_path / "none").exists()


def test_rates_are_of_the_last_seconds():
    now = [0.0]
    rate = Rate(seconds=5.0, clock=lambda: now[0])
    assert rate(0) == 0
    for second in range(1, 11):
        now[0] = second
        assert rate(10 * second) == pytest.approx(10)
    for second in range(11, 18):
        now[0] = second
        last = rate(100)
    assert last == 0
    assert rate(0) == 0  # A count that fell: the run went back to a checkpoint.


def test_threads_can_note_events(tmp_path):
    with record_events(tmp_path):
        threads = [
            threading.Thread(target=note_event, args=(live.HOST, f"Host {index}."))
            for index in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(events(tmp_path)) == 8
