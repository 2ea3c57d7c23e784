"""The replay role without its server."""

import itertools

import numpy as np
import pytest
from role_testing import (
    Background,
    make_args,
    make_replay,
    make_stream,
    transitions,
    wait_until,
)

from embodied.checkpoint import Checkpoint, CheckpointError
from embodied.replay.durable import ChunkFolder
from embodied.rpc import Unanswered
from embodied.run.parallel.replay import LIMITER, ReplayRole

# Of 8 trained steps a step, in batches of 2 times 4: one batch a step.
BATCH = 2
FULL = 6  # Steps that make enough sequences for a batch; later ones are held back.


def make_role(folder=None, **changes):
    args = make_args(consec_report=2, **changes)
    folders = [folder and folder / name for name in ("replay", "replay_eval")]
    return ReplayRole(
        make_replay(args, directory=folders[0]),
        make_replay(args, training=False, directory=folders[1]),
        make_stream(args),
        args,
    )


def fill(role, count, envids=(0,), is_eval=False, start=0):
    for index in range(start, start + count):
        role.add_batch(transitions(list(envids), index, is_eval))


def save(role, trained=0):
    return role.save(trained)


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
            assert before < 100
            role.sample_batch_train(0)
            for number in range(1, 100):
                role.sample_batch_train(number)
            task.join()
        assert role.limiter.stats()["inserts"] == 100

    def test_what_is_refused_does_not_count(self):
        role = make_role()
        fill(role, FULL)
        bad = {**transitions([0], FULL), "value": np.zeros((1, 3), np.int32)}
        numbers = itertools.count()
        with Background(lambda: [role.sample_batch_train(i) for i in numbers]) as task:
            for _ in range(20):
                with pytest.raises(ValueError, match="value"):
                    role.add_batch(bad)
                wait_until(lambda: role.limiter.stats()["samples_waiting"])
            stats = role.limiter.stats()
            role.close()
        assert stats["inserts"] == role.stats()["replay/steps"] == FULL
        # One batch a step, and one that was let through before a step was refused.
        assert stats["samples"] <= (FULL + 2) * BATCH
        assert isinstance(task.error, Unanswered)

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

    def test_updates_reach_the_train_replay(self):
        role = make_role(train_ratio=0.0)
        fill(role, FULL)
        batch = role.sample_batch_train()
        fresh = np.full((*batch["stepid"].shape[:2], 2), -1, np.float32)
        role.update({"stepid": batch["stepid"], "dyn/deter": fresh})
        seen = {role.sample_batch_train()["dyn/deter"].min() for _ in range(50)}
        assert -1 in seen


class TestSave:
    def test_what_was_drawn_but_not_trained_on_does_not_count(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        for number in range(4):
            role.sample_batch_train(number)
        assert role.limiter.stats()["samples"] == 4 * BATCH
        assert save(role, trained=1)[LIMITER]["samples"] == 1 * BATCH
        assert save(role, trained=4)[LIMITER]["samples"] == 4 * BATCH

    def test_a_learner_that_came_back_counts_from_zero(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        for number in (0, 1, 2, 0):
            role.sample_batch_train(number)
        assert save(role, trained=1)[LIMITER]["samples"] == 4 * BATCH

    def test_a_save_does_not_wait_for_an_insert_that_waits(self, tmp_path):
        role = make_role(tmp_path)

        def insert():
            for index in itertools.count():
                role.add_batch(transitions([0], index))

        with Background(insert) as task:
            wait_until(lambda: role.limiter.stats()["inserts_waiting"])
            with Background(save, role) as saving:
                saving.join()
            assert saving.error is None
            parts = saving.result
            role.close()
        assert isinstance(task.error, Unanswered)
        assert parts[LIMITER]["inserts"] == parts_steps(parts, tmp_path)

    def test_all_parts_come_back(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        fill(role, 12, (9,), is_eval=True)
        role.sample_batch_train(0)
        parts = save(role, trained=1)
        assert set(parts) == {LIMITER, "replay", "replay_eval"}
        assert role.records(parts, tmp_path)
        other = make_role(tmp_path)
        other.load(parts)
        assert other.limiter.stats() == role.limiter.stats()
        for name in ("replay/steps", "replay_eval/steps", "replay/items"):
            assert other.stats()[name] == role.stats()[name]
        other.sample_batch_train(0)

    def test_what_was_not_committed_is_removed(self, tmp_path):
        role = make_role(tmp_path)
        fill(role, FULL)
        parts = save(role)
        files = {tmp_path / record.path for record in role.records(parts, tmp_path)}
        assert files and all(path.exists() for path in files)
        role.discard(parts)
        assert not any(path.exists() for path in files)

    @pytest.mark.parametrize("failing", ["replay", "replay_eval"])
    def test_a_replay_that_fails_takes_the_other_one_back(
        self, tmp_path, monkeypatch, failing
    ):
        role = make_role(tmp_path)
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
                save(role)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        records = role.records(save(role), tmp_path)
        assert len({record.path.split("/")[0] for record in records}) == 2

    def test_a_role_that_starts_removes_what_was_never_committed(self, tmp_path):
        role, checkpoint = make_role(tmp_path), Checkpoint(tmp_path, min_free_bytes=0)
        fill(role, FULL)
        fill(role, 12, (9,), is_eval=True)
        parts, tag = save(role), checkpoint.new_tag()
        checkpoint.commit(tag, role.records(parts, tmp_path))
        committed = replay_files(tmp_path)
        fill(role, 12, (9,), is_eval=True, start=12)
        save(role)  # Neither committed nor discarded.
        assert replay_files(tmp_path) > committed
        other = make_role(tmp_path)
        other.load(parts)
        other.clean(parts, checkpoint.listed(), tmp_path)
        assert replay_files(tmp_path) == committed


def replay_files(folder):
    return {
        path for name in ("replay", "replay_eval") for path in folder.glob(f"{name}/*")
    }


def parts_steps(parts, folder):
    """How many steps a saved replay has."""
    role = make_role(folder)
    role.load({"replay": parts["replay"]})
    return role.stats()["replay/steps"]
