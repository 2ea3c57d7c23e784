"""The independent reader of the chaos test finds every problem, and nothing else."""

import time

import numpy as np
import pytest
from chaos_testing import ENV, LIFE, TAG, Logdir, transitions

from benchmarks.chaos import audit, reader
from benchmarks.chaos.audit import IN_FLIGHT, STALE, Window
from benchmarks.chaos.numbered_env import TRACES, Numbered, pack, unpack


@pytest.fixture
def logdir(tmp_path):
    return Logdir(tmp_path / "run")


class TestEnvironment:
    def test_numbers_survive_as_float32(self):
        numbers = [0, 1, 65535, 65536, 2**31 - 1]
        np.testing.assert_array_equal(unpack(pack(numbers)), numbers)

    def test_its_steps_and_its_trace_are_what_the_reader_expects(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv(TRACES, str(tmp_path))
        env = Numbered(seed=ENV)
        found = [env.step({"action": 0, "reset": False}) for _ in range(100)]
        env.close()
        life = int(unpack(found[0]["where"])[1])
        expected = transitions(range(100), life)
        for key in ("where", "reward", "is_first", "is_last"):
            np.testing.assert_array_equal([x[key] for x in found], expected[key])
        ((known, (number, times)),) = audit.read_traces(tmp_path).items()
        assert (known, number, len(times)) == (life, ENV, 100)
        assert (np.diff(times) > 0).all()

    def test_an_instance_that_makes_no_step_leaves_no_trace(
        self, tmp_path, monkeypatch
    ):
        monkeypatch.setenv(TRACES, str(tmp_path))
        assert set(Numbered().obs_space) > {"where"}
        assert list(tmp_path.iterdir()) == []


class TestStored:
    def test_a_good_one(self, logdir):
        first, second = transitions(range(20)), transitions(range(20, 50))
        logdir.add_chunk("a", first, second)
        logdir.add_chunk("b", transitions(range(50, 60)), previous=0)
        logdir.add_chunk("c", transitions(range(9), LIFE + 1), replay="replay_eval")
        stored = audit.read_stored(logdir.commit())
        assert stored.problems == []
        assert [len(x.where) for x in stored.streams["replay"]] == [60]
        assert stored.counts["stored"] == 69
        wrong = ("gaps", "mixed", "breaks", "duplicates", "torn_episodes")
        assert not any(stored.counts[name] for name in wrong)
        assert {life: len(x) for life, x in stored.counters().items()} == {
            LIFE: 60,
            LIFE + 1: 9,
        }
        assert set(stored.counters(shortest=10)) == {LIFE}
        assert audit.read_counts(logdir.folder, stored.manifest) == {
            "step": 10,
            "updates": 5,
        }
        assert audit.check_leftovers(logdir.folder, time.time()) == ([], 0)

    def test_a_gap(self, logdir):
        counters = [*range(10), *range(11, 20)]
        logdir.add_chunk("a", transitions(counters, is_first=np.arange(19) == 0))
        assert audit.read_stored(logdir.commit()).counts["gaps"] == 1

    def test_a_gap_between_chunks_counts_only_if_one_follows_the_other(self, logdir):
        logdir.add_chunk("a", transitions(range(6)))
        logdir.add_chunk("b", transitions([8, 9]))
        logdir.add_chunk("c", transitions([12, 13]), previous=1)
        assert audit.read_stored(logdir.commit()).counts["gaps"] == 1

    def test_a_break_that_is_marked(self, logdir):
        steps = transitions([*range(10), *range(15, 20)])
        steps["is_first"][10] = True
        logdir.add_chunk("a", steps)
        counts = audit.read_stored(logdir.commit()).counts
        assert (counts["gaps"], counts["breaks"]) == (0, 1)

    def test_two_lives_in_one_stream(self, logdir):
        logdir.add_chunk("a", transitions(range(7)), transitions(range(5), LIFE + 1))
        counts = audit.read_stored(logdir.commit()).counts
        assert (counts["gaps"], counts["breaks"]) == (0, 1)

    def test_two_environments_in_one_stream(self, logdir):
        other = transitions(range(5), LIFE + 1, ENV + 1)
        logdir.add_chunk("a", transitions(range(7)), other)
        assert audit.read_stored(logdir.commit()).counts["gaps"] == 5

    def test_transitions_that_are_there_twice(self, logdir):
        logdir.add_chunk("a", transitions(range(20)))
        logdir.add_chunk("b", transitions(range(18, 30)))
        assert audit.read_stored(logdir.commit()).counts["duplicates"] == 2

    def test_parts_of_different_transitions(self, logdir):
        rewards = transitions(range(20))["reward"]
        logdir.add_chunk("a", transitions(range(20), reward=np.roll(rewards, 1)))
        assert audit.read_stored(logdir.commit()).counts["mixed"] == 20

    def test_a_hole_between_files(self, logdir):
        logdir.add_chunk("a", *(transitions(range(x, x + 5)) for x in (0, 5, 10)))
        folder = logdir.commit()
        (path,) = [
            x["path"] for x in logdir.files if "-00000005-00000010-" in x["path"]
        ]
        (folder / path).unlink()
        problems = " ".join(audit.read_stored(folder).problems)
        assert path in problems and "a hole" in problems

    @pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
    def test_a_damaged_file(self, logdir, how):
        logdir.add_chunk("a", transitions(range(20)))
        folder = logdir.commit()
        path = folder / f"ckpt/agent/{TAG}.json"
        data = path.read_bytes()
        if how == "delete":
            path.unlink()
        else:
            path.write_bytes(data[:-1] + b"]" if how == "flip" else data[:-1])
        problem, no_other = audit.read_stored(folder).problems
        assert f"ckpt/agent/{TAG}.json" in problem
        assert no_other == "there is no checkpoint"
        damaged = [f"ckpt/agent/{TAG}.json"]
        assert audit.read_stored(folder, damaged).problems == [no_other]

    def test_a_damaged_manifest(self, logdir):
        logdir.add_chunk("a", transitions(range(20)))
        path = logdir.commit() / "ckpt/manifest.json"
        path.write_bytes(path.read_bytes().replace(b'"step":10', b'"step":11'))
        found, problems = reader.manifests(logdir.folder)
        assert [manifest.meta["step"] for manifest in found] == [10]
        assert len(problems) == 1 and "manifest.json" in problems[0]

    def test_no_checkpoint(self, tmp_path):
        assert audit.read_stored(tmp_path).problems == ["there is no checkpoint"]


def test_roles_that_went_back_to_the_same_save():
    windows = [
        Window("kill_agent", 10.0, 11.0, 13.0, ("agent",)),
        Window("kill_replay", 10.0, 14.0, 15.0, ("replay",)),
        Window("kill_agent", 20.0, 21.0, 22.0, ("agent",)),
        Window("kill_replay", 30.0, 31.0, 32.0, ("replay", "logger")),
        Window("kill_several", 40.0, 41.0, 42.0, ("replay", "agent")),
        Window("kill_launcher", 50.0, 51.0, 52.0, ("launcher",)),
    ]
    both = audit.lost_together(windows, "agent", "replay")
    assert both == [(10.0, 15.0), (40.0, 42.0)]


class TestLosses:
    times = 1000.0 + np.arange(500) * 0.1

    def account(self, missing, windows=(), excused=()):
        stored = np.setdiff1d(np.arange(500), missing)
        traces = {LIFE: (ENV, self.times)}
        return audit.account(traces, {LIFE: stored}, list(windows), set(excused), 9)

    def test_nothing(self):
        losses = self.account([])
        assert (losses.made, losses.total, losses.unexplained) == (500, 0, [])

    def test_what_came_after_the_last_save(self):
        window = Window("kill_replay", 1020.0, 1022.0, 1024.0, ("replay",))
        losses = self.account(range(200, 221), [window])
        assert losses.unexplained == []
        assert losses.by_kind == {"kill_replay": 21}
        assert losses.worst == 21
        assert losses.seconds == {"kill_replay": pytest.approx(2.0)}

    def test_what_was_saved(self):
        window = Window("kill_replay", 1020.0, 1022.0, 1024.0, ("replay",))
        saved = 200 - IN_FLIGHT - 1
        losses = self.account(range(saved, 221), [window])
        assert (
            len(losses.unexplained) == 1 and f"step {saved} " in losses.unexplained[0]
        )

    def test_a_role_without_transitions_explains_nothing(self):
        window = Window("kill_logger", 1020.0, 1022.0, 1024.0, ("logger",))
        assert len(self.account(range(200, 221), [window]).unexplained) == 21

    def test_damaged_files_and_the_last_step_of_a_life(self):
        losses = self.account([7, 8, 499], excused=[(LIFE, 7), (LIFE, 8)])
        assert losses.unexplained == []
        assert losses.by_kind == {"damaged_file": 2, "last_of_life": 1}

    def test_a_life_that_was_over_is_not_harmed_by_a_later_fault(self):
        end = self.times[-1]
        for later, kind in ((STALE - 1, "end"), (STALE + 1, "last_of_life")):
            begin = end + later
            window = Window("end", begin, begin + 1, begin + 2, ("replay",))
            assert self.account([499], [window]).by_kind == {kind: 1}

    def test_a_transition_that_nobody_made(self):
        losses = audit.account(
            {LIFE: (ENV, self.times[:3])}, {LIFE: np.arange(4)}, [], set(), 9
        )
        assert len(losses.unexplained) == 1

    def test_a_checkpoint_that_lacks_what_one_before_had(self):
        before, after = {LIFE: np.arange(10)}, {LIFE: np.arange(2, 20)}
        assert audit.forgotten(before, after, set()) == 2
        assert audit.forgotten(before, after, {(LIFE, 0)}) == 1
        assert audit.forgotten(before, {}, set()) == 10

    def test_steps_within_a_time(self):
        traces = {LIFE: (ENV, self.times), LIFE + 1: (ENV + 1, self.times)}
        assert audit.made_within(traces, [ENV], 1010.0, 1019.95) == 100


def test_files_that_should_not_be_there(logdir):
    logdir.add_chunk("a", transitions(range(20)))
    folder = logdir.commit()
    (folder / "config.yaml").unlink()
    for name in ("replay/new.steps", "ckpt/agent/.0123456789abcdef.partial-save"):
        (folder / name).touch()
    problems, recent = audit.check_leftovers(folder, time.time() + 1)
    assert (len(problems), recent) == (3, 0)
    problems, recent = audit.check_leftovers(folder, time.time() - 60)
    assert (problems, recent) == (["there is no config.yaml"], 2)


def test_lines_that_are_torn_or_go_back(tmp_path):
    steps = [1, 5, 3, 4]
    lines = [f'{{"step": {step}}}\n' for step in steps]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    (tmp_path / "scores.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n{"unfin')
    assert audit.check_metrics(tmp_path) == {"torn_lines": 1, "timeline_jumps": 1}
