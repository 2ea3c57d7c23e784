"""Saves over several roles, without their connections."""

import errno
import itertools
import os
import threading
import time

import numpy as np
import pytest
from role_testing import Background, CountingAgent, FakeClient, make_args
from waiting_testing import wait_until

from embodied.checkpoint import Checkpoint, CheckpointError, reading
from embodied.rpc import Disconnected
from embodied.run.parallel.conductor import (
    Conductor,
    RoleCheckpoint,
    pack_reply,
    unpack_reply,
)

NOTHING = pack_reply([], {})


def make_conductor(folder, replay=None, logger=None):
    replay = replay or FakeClient(save=NOTHING)
    logger = logger or FakeClient(save=pack_reply([], {"step": 7}))
    args = role_args(folder)
    return Conductor(CountingAgent(), replay, logger, args), replay, logger


def role_args(folder):
    return make_args(logdir=str(folder), from_checkpoint="", replica=0, replicas=1)


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


class TestErrors:
    def test_an_agent_that_cannot_be_saved_ends_the_learner_at_once(
        self, tmp_path, monkeypatch
    ):
        def fail(self):
            raise FloatingPointError("the agent broke")

        conductor, _, _ = make_conductor(tmp_path, FakeClient(held=["save"]))
        with monkeypatch.context() as patch:
            patch.setattr(CountingAgent, "save", fail)
            with pytest.raises(FloatingPointError, match="the agent broke"):
                conductor.save(trained=0)
        with Background(conductor.close) as closing:
            closing.join()
        assert not conductor.busy
        assert not conductor.wait()

    @pytest.mark.parametrize("role", ["replay", "logger"])
    def test_a_call_that_cannot_be_sent_fails_the_save_alone(
        self, tmp_path, caplog, role
    ):
        class Unreachable(FakeClient):
            def call(self, method, *arguments, rows=0):
                if method == "save":
                    raise Disconnected("the role is gone")
                return super().call(method, *arguments, rows=rows)

        conductor, _, _ = make_conductor(tmp_path, **{role: Unreachable()})
        conductor.save(trained=0)
        assert not conductor.wait()
        conductor.close()
        assert "training goes on. the role is gone" in caplog.text
        assert not Checkpoint(tmp_path).exists()

    def test_saves_go_on_after_one_that_failed(self, tmp_path):
        answers = iter([OSError("not now"), NOTHING])
        conductor, replay, _ = make_conductor(tmp_path)
        replay._answers["save"] = lambda *_: next(answers)
        conductor.save(trained=0)
        assert not conductor.wait()
        conductor.save(trained=1)
        assert conductor.wait()


class TestRestore:
    def test_the_source_of_a_run_is_not_needed_to_resume_it(self, tmp_path):
        conductor, _, _ = make_conductor(tmp_path / "run")
        conductor.save(trained=0)
        assert conductor.wait()
        args = make_args(
            logdir=str(tmp_path / "run"), from_checkpoint=str(tmp_path / "gone")
        )
        other = Conductor(CountingAgent(), FakeClient(), FakeClient(), args)
        assert other.restore()

    @pytest.mark.parametrize(("saved", "now"), [(1, 2), (2, 1), (3, 2), (2, 3)])
    def test_another_number_of_replicas_is_refused(self, tmp_path, saved, now):
        def role(replica, replicas):
            changes = {"replica": replica, "replicas": replicas}
            return RoleCheckpoint(make_args(logdir=str(tmp_path), **changes))

        checkpoint = Checkpoint(tmp_path)
        tag, records = checkpoint.new_tag(), []
        for replica in range(saved):
            state = {"logger": {"step": 5}}
            reply = role(replica, saved).write(tag, state, {})
            records += unpack_reply(reply)[0]
        checkpoint.commit(tag, records)
        assert role(0, saved).load(["logger"]) == {"logger": {"step": 5}}
        message = f"saved with {saved}, got {now}.*--replicas {saved}"
        with pytest.raises(CheckpointError, match=message):
            role(0, now).load(["logger"])
        assert role(0, now).load(["other"]) == {}


class TestDamage:
    """Roles that start together go on from the same checkpoint, whatever is damaged."""

    PARTS = ("agent", "replay", "logger")

    def commit(self, folder, step):
        checkpoint = Checkpoint(folder)
        tree = {"step": step, "weights": np.full(1000, step)}
        return checkpoint.save(dict.fromkeys(self.PARTS, tree), {"step": step})

    def start(self, folder, order):
        """Starts all roles; returns the step that each goes on from."""
        steps = {}
        for role in order:
            if role == "agent":
                agent = CountingAgent()
                agent.load = lambda data, regex=None: steps.update(agent=data["step"])
                conductor, _, _ = make_conductor(folder)
                conductor._agent = agent
                conductor.restore()
            else:
                steps[role] = RoleCheckpoint(role_args(folder)).load([role])[role][
                    "step"
                ]
        return steps

    @pytest.mark.parametrize("order", [*itertools.permutations(PARTS)])
    @pytest.mark.parametrize("damaged", PARTS)
    def test_all_fall_back_together(self, tmp_path, damaged, order):
        self.commit(tmp_path, 1)
        path = tmp_path / "ckpt" / damaged / f"{self.commit(tmp_path, 2)}.safetensors"
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        assert self.start(tmp_path, order) == dict.fromkeys(self.PARTS, 1)

    @pytest.mark.parametrize("damaged", PARTS)
    def test_damage_between_two_starts_is_noticed(self, tmp_path, damaged):
        self.commit(tmp_path, 1)
        path = tmp_path / "ckpt" / damaged / f"{self.commit(tmp_path, 2)}.safetensors"
        assert self.start(tmp_path, self.PARTS) == dict.fromkeys(self.PARTS, 2)
        path.write_bytes(path.read_bytes()[::-1])
        assert self.start(tmp_path, self.PARTS) == dict.fromkeys(self.PARTS, 1)

    def test_every_file_is_verified_once(self, tmp_path, monkeypatch):
        self.commit(tmp_path, 1)
        verified = []
        original = reading.find_damage

        def note(root, record):
            verified.append(record.path)
            return original(root, record)

        monkeypatch.setattr(reading, "find_damage", note)
        self.start(tmp_path, self.PARTS)
        assert sorted(verified) == sorted(set(verified))
        assert len(verified) == 2 * len(self.PARTS)

    def test_notes_that_cannot_be_read_count_for_nothing(self, tmp_path):
        self.commit(tmp_path, 1)
        (tmp_path / "ckpt" / "verified").write_bytes(b'{"ckpt/agent')
        assert self.start(tmp_path, self.PARTS) == dict.fromkeys(self.PARTS, 1)

    def test_old_notes_count_for_nothing(self, tmp_path, monkeypatch):
        """Bit rot changes neither the size nor the time of a file."""
        self.commit(tmp_path, 1)
        path = tmp_path / "ckpt" / "agent" / f"{self.commit(tmp_path, 2)}.safetensors"
        self.start(tmp_path, self.PARTS)
        status = path.stat()
        content = bytearray(path.read_bytes())
        content[-1] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        later = time.time() + 3600
        monkeypatch.setattr(time, "time", lambda: later)
        assert self.start(tmp_path, self.PARTS) == dict.fromkeys(self.PARTS, 1)


def test_a_run_that_does_not_fit_is_told_apart_from_a_failure(tmp_path, monkeypatch):
    def refuse(self, data, regex=None):
        raise ValueError("Other shapes: kernel.")

    conductor = make_conductor(tmp_path)[0]
    conductor.save(trained=0)
    assert conductor.wait()
    wait_until(lambda: not saving_threads())  # They would log in the next test.
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
