"""The replay role without its server."""

import functools
import itertools
import json
import shutil
import threading

import numpy as np
import pytest
from loop_testing import make_replay, make_stream
from role_testing import Background, make_args, transitions
from waiting_testing import WAIT, wait_until

from embodied.checkpoint import Checkpoint, CheckpointError, PartWriter
from embodied.replay.chunkfiles import ChunkFolder
from embodied.rpc import Unanswered
from embodied.run.parallel import wiring
from embodied.run.parallel.conductor import unpack_reply
from embodied.run.parallel.replay import LIMITER, ReplayRole, serve

# With 8 trained steps per step and batches of 2 · 4 steps, one batch per step.
BATCH = 2
START = 8  # Sequences needed for training to begin.
FULL = START + 4  # Steps of one env that make as many sequences.


def make_role(folder=None, **changes):
    args = make_args(consec_report=2, **changes)
    folders = [folder and folder / name for name in ("replay", "replay_eval")]
    return ReplayRole(
        make_replay(args, directory=folders[0]),
        make_replay(args, training=False, directory=folders[1]),
        functools.partial(make_stream, args),
        args,
    )


def fill(role, count, envids=(0,), is_eval=False, start=0):
    for index in range(start, start + count):
        role.add_batch(transitions(list(envids), index, is_eval))


class Saves:
    """Saves a role under new tags, as its server does."""

    def __init__(self, folder):
        self.checkpoint = Checkpoint(folder)
        self.writer = PartWriter(self.checkpoint)
        self.tag = ""

    def save(self, role, trained=0):
        """Returns the records."""
        self.tag = self.checkpoint.new_tag()
        return self.writer.write(self.tag, role.cut(trained))

    def parts(self, role, trained=0):
        """Commits a save; returns its parts."""
        records = self.save(role, trained)
        self.checkpoint.commit(self.tag, records)
        return self.checkpoint.load()[0]


def save(role, folder, trained=0):
    return Saves(folder).parts(role, trained)


class TestInserts:
    def test_rows_go_to_the_replay_of_their_kind(self):
        role = make_role(train_ratio=0.0)
        for index in range(20):
            role.add_batch(transitions([5, 6], index, is_eval=[False, True]))
        stats = role.stats()
        assert stats["replay/steps"] == stats["replay_eval/steps"] == 20
        batch = role.sample_batch_train()
        assert set(batch) >= {"value", "stepid", "consec"}
        assert not {"envid", "is_eval"} & set(batch)

    def test_evaluation_bypasses_the_limiter(self):
        role = make_role()
        fill(role, FULL)
        inserts = role.limiter.stats()["inserts"]
        with Background(fill, role, 100, (1,), True) as task:
            task.join()
        assert role.limiter.stats()["inserts"] == inserts
        assert role.stats()["replay_eval/steps"] == 100

    def test_training_is_held_back_until_it_is_trained_on(self):
        role = make_role()
        with Background(fill, role, 100) as task:
            wait_until(lambda: role.limiter.stats()["inserts_waiting"])
            before = role.limiter.stats()["inserts"]
            assert before < 100 - FULL
            for number in range(100 - FULL):
                role.sample_batch_train(number)
            task.join()
        assert role.limiter.stats()["inserts"] == 100 - FULL

    def test_there_is_no_batch_before_the_start_and_then_one(self):
        role = make_role()
        with Background(role.sample_batch_train, 0) as first:
            fill(role, FULL - 1)
            wait_until(lambda: role.limiter.stats()["samples_waiting"])
            assert role.limiter.stats()["samples"] == 0
            fill(role, 1, start=FULL - 1)
            first.join()
        with Background(role.sample_batch_train, 1) as second:
            wait_until(lambda: role.limiter.stats()["samples_waiting"])
            assert role.limiter.stats()["samples"] == BATCH, "nothing is made up for"
            fill(role, 1, start=FULL)
            second.join()

    def test_a_replay_with_less_room_begins_when_it_is_full(self):
        args = make_args()
        train, other = make_replay(args, capacity=5), make_replay(args, training=False)
        role = ReplayRole(train, other, functools.partial(make_stream, args), args)
        fill(role, 4 + 5)
        assert role.sample_batch_train(0)["stepid"].shape[0] == BATCH

    def test_refused_steps_do_not_count(self):
        role = make_role()
        fill(role, FULL)
        bad = {**transitions([0], FULL), "value": np.zeros((1, 3), np.int32)}
        for _ in range(20):
            with pytest.raises(ValueError, match="value"):
                role.add_batch(bad)
        role.sample_batch_train(0)
        with Background(role.sample_batch_train, 1) as task:
            wait_until(lambda: role.limiter.stats()["samples_waiting"])
            stats = role.limiter.stats()
            role.close()
        assert stats["inserts"] == 0, "since training has begun"
        assert role.stats()["replay/steps"] == FULL
        assert isinstance(task.error, Unanswered)

    def test_no_sequence_reaches_across_refused_steps(self):
        role = make_role(train_ratio=0.0)
        fill(role, 10)
        bad = {**transitions([0], 10), "value": np.zeros((1, 3), np.int32)}
        with pytest.raises(ValueError, match="value"):
            role.add_batch(bad)
        fill(role, 10, start=11)  # Sent before the actor has heard of it.
        batch = role._train.sample(100, "report")
        follows = np.diff(batch["value"], axis=1) == 1
        gaps = ~follows & batch["is_last"][:, :-1] & batch["is_first"][:, 1:]
        assert gaps.any() and (follows | gaps).all()

    def test_closing_ends_waits_without_an_answer(self):
        role = make_role()
        with Background(fill, role, 100) as inserts:
            wait_until(lambda: role.limiter.stats()["inserts_waiting"])
            role.close()
        assert isinstance(inserts.error, Unanswered)
        with pytest.raises(Unanswered):
            role.sample_batch_train()


class TestSamples:
    def test_nothing_stored_is_nothing_sampled(self):
        role = make_role()
        assert role.sample_batch_eval() == {}
        assert role.sample_batch_report() == {}
        fill(role, FULL)
        assert role.sample_batch_eval() == {}
        assert role.sample_batch_report()["value"].shape == (BATCH, 2 + 1)

    def test_reports_do_not_count(self):
        role = make_role()
        fill(role, FULL)
        for _ in range(10):
            role.sample_batch_report()
        assert role.limiter.stats()["samples"] == 0

    def test_a_learner_that_came_back_begins_with_the_first_chunk(self):
        role = make_role(train_ratio=0.0, consec_train=2)
        fill(role, 40)
        first = [role.sample_batch_train(x)["consec"][0, 0] for x in range(3)]
        again = [role.sample_batch_train(x)["consec"][0, 0] for x in range(3)]
        assert first == again == [0, 1, 0]

    @pytest.mark.parametrize("source", ["report", "eval"])
    def test_a_report_begins_with_the_first_chunk(self, source):
        role = make_role(train_ratio=0.0)  # With two chunks in reports.
        fill(role, 40, is_eval=source == "eval")
        sample = getattr(role, f"sample_batch_{source}")
        assert [sample(0)["consec"][0, 0] for _ in range(3)] == [0, 0, 0]
        assert sample(1)["consec"][0, 0] == 1

    def test_updates_reach_the_train_replay(self):
        role = make_role(train_ratio=0.0)
        fill(role, FULL)
        batch = role.sample_batch_train()
        fresh = np.full((*batch["stepid"].shape[:2], 2), -1, np.float32)
        role.update({"stepid": batch["stepid"], "dyn/deter": fresh})
        seen = {role.sample_batch_train()["dyn/deter"].min() for _ in range(50)}
        assert -1 in seen


class TestSave:
    def test_batches_that_were_not_trained_on_do_not_count(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL + 3)
        for number in range(4):
            role.sample_batch_train(number)
        assert role.limiter.stats()["samples"] == 4 * BATCH
        assert role_counts(role, tmp_path, trained=1) == 1 * BATCH
        assert role_counts(role, tmp_path, trained=4) == 4 * BATCH

    def test_a_learner_that_came_back_counts_from_zero(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL + 3)
        for number in (0, 1, 2, 0):
            role.sample_batch_train(number)
        assert role_counts(role, tmp_path, trained=1) == 4 * BATCH

    def test_updates_that_a_learner_has_lost_are_made_again(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL + 3)
        for number in range(2):
            role.sample_batch_train(number)
        saved = save(role, tmp_path, trained=1)["limiter"]
        for number in range(2, 4):
            role.sample_batch_train(number)
        role.begin_training(json.dumps(saved))
        assert role.limiter.stats()["samples"] == 1 * BATCH
        for number in range(3):
            role.sample_batch_train(number)
        assert role.limiter.stats()["samples"] == 4 * BATCH
        assert role_counts(role, tmp_path, trained=2) == 3 * BATCH

    def test_calls_of_a_learner_that_was_killed_do_not_count(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL + 3)
        role.sample_batch_train(500)
        saved = save(role, tmp_path, trained=501)["limiter"]
        role.begin_training(json.dumps(saved))
        with pytest.raises(Unanswered, match="Another learner"):
            role.sample_batch_train(501)
        role.sample_batch_train(1)  # Could be a call of the new learner.
        role.sample_batch_train(0)
        assert role.limiter.stats()["samples"] == 2 * BATCH

    def test_with_another_ratio_counts_begin_anew(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL + 3)
        saved = save(role, tmp_path)["limiter"]
        role.sample_batch_train(0)
        role.begin_training(json.dumps({**saved, "samples": 99, "ratio": [7, 3]}))
        assert role.limiter.stats()["samples"] == 0
        with pytest.raises(ValueError, match="saved state"):
            role.begin_training("{}")

    def test_a_save_does_not_wait_for_an_insert_that_waits(self, tmp_path):
        role = make_role(tmp_path)

        def insert():
            for index in itertools.count():
                role.add_batch(transitions([0], index))

        with Background(insert) as task:
            wait_until(lambda: role.limiter.stats()["inserts_waiting"])
            with Background(save, role, tmp_path) as saving:
                saving.join()
            assert saving.error is None
            parts = saving.result
            role.close()
        assert isinstance(task.error, Unanswered)
        assert parts[LIMITER]["inserts"] + FULL == parts_steps(parts, tmp_path)

    def test_steps_and_counts_of_a_save_agree_while_steps_come_in(self, tmp_path):
        role, saves = make_role(tmp_path, train_ratio=1e-6), Saves(tmp_path)
        over = threading.Event()

        def insert():
            for index in itertools.count():
                if over.is_set():
                    return
                is_eval = [False, True, False]
                role.add_batch(transitions([0, 1, 2], index, is_eval))

        with Background(insert):
            wait_until(lambda: role.limiter.begun)
            every = [saves.parts(role) for _ in range(4)]
            over.set()
        totals = [parts["replay"]["counters"]["inserts"] for parts in every]
        counted = [parts[LIMITER]["inserts"] for parts in every]
        assert len(set(totals)) > 1
        assert len({x - y for x, y in zip(totals, counted)}) == 1, "those of the start"

    def test_samples_go_on_while_a_save_keeps_inserts_waiting(
        self, tmp_path, monkeypatch
    ):
        args = make_args()
        train = make_replay(args, directory=tmp_path / "replay", save_wait=True)
        other = make_replay(args, training=False)
        role = ReplayRole(train, other, functools.partial(make_stream, args), args)
        fill(role, FULL)
        writing, go_on = threading.Event(), threading.Event()
        write = ChunkFolder.write

        def slow_write(*arguments):
            writing.set()
            assert go_on.wait(60)
            return write(*arguments)

        monkeypatch.setattr(ChunkFolder, "write", slow_write)
        with Background(save, role, tmp_path) as saving:
            assert writing.wait(60)
            with Background(fill, role, 1, (0,), False, FULL) as insert:
                role.sample_batch_train(0)
                assert insert.running
                go_on.set()
                insert.join()
            saving.join()
        assert saving.error is None

    def test_all_parts_come_back(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        fill(role, 12, (9,), is_eval=True)
        role.sample_batch_train(0)
        parts = save(role, tmp_path, trained=1)
        assert set(parts) == {LIMITER, "replay", "replay_eval"}
        other = make_role(tmp_path)
        other.load(parts)
        assert other.limiter.stats() == role.limiter.stats()
        for name in ("replay/steps", "replay_eval/steps", "replay/items"):
            assert other.stats()[name] == role.stats()[name]
        fill(other, 1)
        other.sample_batch_train(0)

    def test_parts_of_older_checkpoints_that_are_gone_are_ignored(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        parts = save(role, tmp_path)
        other = make_role(tmp_path)
        other.load({**parts, "replay_calls": {"sessions": []}})
        assert other.stats()["replay/steps"] == FULL

    def test_files_that_were_not_committed_are_removed(self, tmp_path):
        role, saves = make_role(tmp_path), Saves(tmp_path)
        fill(role, FULL)
        saves.save(role)
        assert replay_files(tmp_path)
        saves.writer.discard("another tag")
        assert replay_files(tmp_path)
        saves.writer.discard(saves.tag)
        assert not replay_files(tmp_path)

    @pytest.mark.parametrize("failing", ["replay", "replay_eval"])
    def test_a_replay_that_fails_takes_the_other_one_back(
        self, tmp_path, monkeypatch, failing
    ):
        role, saves = make_role(tmp_path), Saves(tmp_path)
        fill(role, FULL)
        fill(role, 12, (9,), is_eval=True)
        write = ChunkFolder.write

        def write_or_fail(self, *args):
            if self.path.name == failing:
                raise CheckpointError("the disk is full")
            return write(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(ChunkFolder, "write", write_or_fail)
            with pytest.raises(CheckpointError, match="the disk is full"):
                saves.save(role)
        assert not replay_files(tmp_path)
        folders = {record.path.split("/")[0] for record in saves.save(role)}
        assert folders == {"ckpt", "replay", "replay_eval"}

    def test_a_role_that_starts_removes_files_that_were_never_committed(self, tmp_path):
        role, saves = make_role(tmp_path), Saves(tmp_path)
        fill(role, FULL)
        fill(role, 12, (9,), is_eval=True)
        parts = saves.parts(role)
        committed = replay_files(tmp_path)
        fill(role, 12, (9,), is_eval=True, start=12)
        saves.save(role)  # Neither committed nor discarded.
        assert replay_files(tmp_path) > committed
        other = make_role(tmp_path)
        other.load(parts)
        for replay in other.replays.values():
            replay.clean(saves.checkpoint.listed(), tmp_path)
        assert replay_files(tmp_path) == committed


def test_files_without_a_checkpoint_are_loaded_and_kept(tmp_path):
    role = make_role(tmp_path)
    fill(role, FULL)
    save(role, tmp_path)
    shutil.rmtree(tmp_path / "ckpt")
    args = make_args(logdir=str(tmp_path), consec_report=2)
    args = wiring.resolve_addresses(args)
    for _ in range(2):  # The second start finds a checkpoint, and cleans.
        role, stop = make_role(tmp_path), threading.Event()
        with Background(serve, role, args, stop):
            client = wiring.make_client(args.replay_addr, "test", args)
            with client:
                client.connect(WAIT)
                assert role.stats()["replay/steps"] == FULL
                checkpoint = Checkpoint(tmp_path)
                tag = checkpoint.new_tag()
                files, _ = unpack_reply(client.save(tag, 0).result(WAIT))
                checkpoint.commit(tag, files)
            stop.set()
    assert parts_steps(checkpoint.load()[0], tmp_path) == FULL


def role_counts(role, folder, trained):
    """Returns the number of samples that a save counts."""
    return save(role, folder, trained)[LIMITER]["samples"]


def replay_files(folder):
    return {
        path for name in ("replay", "replay_eval") for path in folder.glob(f"{name}/*")
    }


def parts_steps(parts, folder):
    """How many steps a saved replay has."""
    role = make_role(folder)
    role.load({"replay": parts["replay"]})
    return role.stats()["replay/steps"]
