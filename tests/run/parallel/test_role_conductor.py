"""Saves over several roles, without their connections."""

import errno
import os
import threading

import pytest
from role_testing import CountingAgent, FakeClient, make_args, wait_until

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.rpc import Disconnected
from embodied.run.parallel.conductor import Conductor
from embodied.run.parallel.saving import pack_reply

NOTHING = pack_reply([], {})


def make_conductor(folder, replay=None, logger=None):
    replay = replay or FakeClient(save=NOTHING)
    logger = logger or FakeClient(save=pack_reply([], {"step": 7}))
    args = make_args(logdir=str(folder), from_checkpoint="", replica=0, replicas=1)
    return Conductor(CountingAgent(), replay, logger, args), replay, logger


class TestCommit:
    def test_all_parts_are_one_checkpoint(self, tmp_path):
        conductor, replay, logger = make_conductor(tmp_path)
        conductor.save(trained=3)
        assert conductor.wait() and not conductor.busy
        newest = Checkpoint(tmp_path).newest()
        assert newest.meta == {"step": 7}
        assert replay.sent("save") == [(newest.tag, 3)]
        assert logger.sent("save") == [(newest.tag,)]
        assert not replay.sent("discard")

    def test_what_was_not_committed_is_taken_back(self, tmp_path, caplog):
        logger = FakeClient(save=OSError("the disk is on fire"))
        conductor, replay, _ = make_conductor(tmp_path, logger=logger)
        conductor.save(trained=0)
        assert not conductor.wait()
        ((tag, _),) = replay.sent("save")
        assert replay.sent("discard") == logger.sent("discard") == [(tag,)]
        assert not list((tmp_path / "ckpt" / "agent").iterdir())
        assert (
            "could not be saved, training goes on. the disk is on fire" in caplog.text
        )

    def test_a_commit_that_raised_but_happened_keeps_its_files(
        self, tmp_path, monkeypatch, caplog
    ):
        fsync, folder = os.fsync, tmp_path / "ckpt"

        def fail_after_the_rename(descriptor):
            name = os.readlink(f"/proc/self/fd/{descriptor}")
            if name == str(folder) and (folder / "manifest.json").exists():
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            fsync(descriptor)

        conductor, replay, logger = make_conductor(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fail_after_the_rename)
            conductor.save(trained=0)
            assert not conductor.wait()
        assert os.strerror(errno.EIO) in caplog.text
        ((tag, _),) = replay.sent("save")
        assert Checkpoint(tmp_path).newest().tag == tag
        assert not replay.sent("discard") and not logger.sent("discard")
        conductor.save(trained=0)
        assert conductor.wait()


def test_a_run_that_does_not_fit_is_told_apart_from_a_failure(tmp_path, monkeypatch):
    def refuse(self, data, regex=None):
        raise ValueError("Other shapes: kernel.")

    make_conductor(tmp_path)[0].save(trained=0)
    wait_until(Checkpoint(tmp_path).exists)
    monkeypatch.setattr(CountingAgent, "load", refuse)
    words = "holds a run with other settings. Other shapes: kernel. .*another --logdir"
    with pytest.raises(CheckpointError, match=words):
        make_conductor(tmp_path)[0].restore()


class TestAbandon:
    def test_nobody_waits_any_more(self, tmp_path, caplog):
        conductor, replay, _ = make_conductor(tmp_path, FakeClient(held=["save"]))
        conductor.save(trained=0)
        assert conductor.busy
        conductor.abandon()
        assert not conductor.busy
        assert not conductor.wait()
        conductor.close()
        conductor.save(trained=1)
        assert not conductor.wait()
        assert len(replay.sent("save")) == 1
        replay.open[0].set_error(Disconnected("the client is closed"))
        wait_until(lambda: not saving_threads())
        assert not caplog.text and not replay.sent("discard")

    def test_there_may_be_no_save(self, tmp_path):
        conductor, _, _ = make_conductor(tmp_path)
        conductor.abandon()
        assert conductor.wait() and not conductor.busy
        conductor.close()

    def test_a_save_waits_in_no_thread_that_keeps_the_process(self, tmp_path):
        conductor, replay, _ = make_conductor(tmp_path, FakeClient(held=["save"]))
        conductor.save(trained=0)
        assert [thread.daemon for thread in saving_threads()] == [True]
        replay.open[0].set_result(NOTHING)
        assert conductor.wait()
        wait_until(lambda: not saving_threads())


def saving_threads():
    return [x for x in threading.enumerate() if x.name.startswith("save ")]
