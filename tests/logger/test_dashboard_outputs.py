"""Weights & Biases (offline) and Scope get the metrics, or name what to install."""

from __future__ import annotations

import sys

import elements
import numpy as np
import pytest

from embodied.logger import Logger, MissingPackageError, ScopeOutput, WandbOutput

METRICS = {
    "train/loss": 1.5,
    "count": 3,
    "vector": np.float32([1, 2, np.nan]),
    "image": np.zeros((6, 8, 3), np.uint8),
    "gray": np.zeros((6, 8), np.uint8),
    "alpha": np.zeros((6, 8, 4), np.uint8),
    "video": np.zeros((4, 7, 9, 3), np.uint8),
    "gray_video": np.zeros((4, 6, 8, 1), np.uint8),
    "text": "hello",
}


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("wandb", lambda folder: WandbOutput("name", folder)),
        ("scope", lambda folder: ScopeOutput(folder)),
    ],
)
def test_a_missing_package_is_an_error_that_names_the_extra(
    tmp_path, monkeypatch, package, make
):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError) as error:
        make(tmp_path)
    assert f"pip install 'dreamerv3-parallel[{package}]'" in str(error.value)


class FakeRun:
    """Records what would be sent, to check the conversion without a service."""

    def __init__(self):
        self.rows = []
        self.metrics = []
        self.finished = 0

    def define_metric(self, name, **kwargs):
        self.metrics.append((name, kwargs))

    def log(self, row):
        self.rows.append(row)

    def finish(self):
        self.finished += 1


@pytest.fixture
def fake(monkeypatch):
    wandb = pytest.importorskip("wandb", reason="the wandb extra is not installed")
    inits = []

    def init(**kwargs):
        inits.append(kwargs)
        return FakeRun()

    monkeypatch.setattr(wandb, "init", init)
    return inits


class TestWandb:
    def test_values_become_what_wandb_shows(self, tmp_path, fake):
        import wandb

        output = WandbOutput("run", tmp_path)
        run = output._run
        with Logger(10, [output], multiplier=2) as logger:
            logger.add(METRICS)
        (row,) = run.rows
        assert set(row) == {"step", *METRICS}
        assert (row["step"], row["train/loss"], row["count"]) == (20, 1.5, 3)
        assert isinstance(row["vector"], wandb.Histogram)
        assert isinstance(row["image"], wandb.Image)
        assert isinstance(row["gray"], wandb.Image)
        assert isinstance(row["video"], wandb.Video)
        assert row["text"] == "hello"
        assert run.finished == 1

    def test_the_logged_step_is_the_axis_of_all_metrics(self, tmp_path, fake):
        output = WandbOutput("run", tmp_path)
        assert ("*", {"step_metric": "step"}) in output._run.metrics
        output.close()

    def test_steps_and_repeated_names_are_rows_of_their_own(self, tmp_path, fake):
        step = elements.Counter()
        output = WandbOutput("run", tmp_path, pattern="score")
        rows = output._run.rows
        with Logger(step, [output]) as logger:
            logger.add({"score": 1, "other": 5})
            logger.add({"score": 2})
            step.increment()
            logger.add({"score": 3, "step": 7})
        assert rows == [
            {"step": 0, "score": 1},
            {"step": 0, "score": 2},
            {"step": 1, "score": 3},
        ]

    def test_the_same_folder_continues_the_same_run(self, tmp_path, fake):
        WandbOutput("run", tmp_path).close()
        WandbOutput("run", tmp_path).close()
        WandbOutput("run", tmp_path / "other").close()
        first, again, other = (options["id"] for options in fake)
        assert (tmp_path / "wandb_run_id").read_text() == first
        assert first == again != other
        assert fake[0]["resume"] == "allow"

    def test_config_and_options_are_passed_on(self, tmp_path, fake):
        config = elements.Config({"run": {"steps": 100}, "task": "dummy"})
        WandbOutput("run", tmp_path, config, project="p", group="g").close()
        (options,) = fake
        assert options["config"] == {"run.steps": 100, "task": "dummy"}
        assert (options["name"], options["project"], options["group"]) == (
            "run",
            "p",
            "g",
        )

    @pytest.mark.filterwarnings("default")  # wandb's own warnings are not errors here.
    def test_an_offline_run_is_written_to_the_folder(self, tmp_path, monkeypatch):
        wandb = pytest.importorskip("wandb", reason="the wandb extra is not installed")
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.setenv("WANDB_SILENT", "true")
        monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
        monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("WANDB_DATA_DIR", str(tmp_path / "data"))
        output = WandbOutput("run", tmp_path / "logdir", {"seed": 1}, project="test")
        with Logger(10, [output]) as logger:
            logger.add(METRICS)
        wandb.teardown()  # Its service may still be writing until then.
        (file,) = (tmp_path / "logdir").glob("wandb/offline-run-*/run-*.wandb")
        data = file.read_bytes()
        assert b"train/loss" in data
        assert b"hello" in data
        media = list(file.parent.glob("files/media/videos/*.gif"))
        assert len(media) == 2


class TestScope:
    @pytest.fixture
    def scope(self):
        return pytest.importorskip("scope", reason="the scope extra is not installed")

    def test_values_are_columns_of_the_dashboard(self, tmp_path, scope):
        with Logger(10, [ScopeOutput(tmp_path, fps=20)], multiplier=2) as logger:
            logger.add(METRICS)
            logger.write()
            logger.add({"count": 4})
        reader = scope.Reader(tmp_path)
        assert set(reader.keys()) == {*METRICS} - {"vector"}
        steps, values = reader["count"]
        assert steps.tolist() == [20, 20]
        assert values.tolist() == [3.0, 4.0]
        _, (video,) = reader["video"]
        # Odd sizes are padded for the codec.
        assert reader.load("video", video).shape == (4, 8, 10, 3)

    def test_names_that_scope_refuses_are_adapted(self, tmp_path, scope):
        with Logger(0, [ScopeOutput(tmp_path)]) as logger:
            logger.add({"Usage/GPU (%)": 1.0, "train/loss/image": 2.0})
        keys = scope.Reader(tmp_path).keys()
        assert set(keys) == {"_Usage/GPU____", "train/loss/image"}

    def test_errors_of_writing_are_reported(self, tmp_path, scope, caplog):
        logger = Logger(0, [ScopeOutput(tmp_path)])
        (tmp_path / "scope" / "a.float").mkdir()
        logger.add({"a": 1.0})
        logger.close()
        assert "ScopeOutput failed" in caplog.text
