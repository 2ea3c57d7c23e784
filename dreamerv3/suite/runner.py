"""The program `--script suite`: plans the runs, runs them and writes the results."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import elements

from dreamerv3 import plot
from dreamerv3.cli.config import (
    FILENAME,
    ConfigError,
    action_repeat,
    fill_logdir,
    load_config,
    split_arguments,
)
from dreamerv3.cli.logdir import as_config_errors, claim
from dreamerv3.cli.scripts import RunError
from dreamerv3.cli.texts import package_version
from dreamerv3.suite import score_table
from dreamerv3.suite.accelerators import Slot, open_slots
from dreamerv3.suite.curves import PlotError
from dreamerv3.suite.display import SuiteDisplay, status_line
from dreamerv3.suite.presets import Preset, make_presets
from dreamerv3.suite.run_queue import FAILED, RunQueue, SuiteRun
from embodied.checkpoint import write_file
from embodied.run.console import stop_on_signals

# Set by the suite for each of its runs.
OWN_FLAGS = ("configs", "script", "task", "seed", "logdir")
ALL = ("all",)  # Value of `suite.tasks` for all tasks of the preset.
PICTURE = "curves.png"
INTERRUPTED = (
    "Interrupted: the runs save, then the suite ends. Ctrl-C again leaves now."
)


def run_suite(config: elements.Config, argv: Sequence[str]) -> None:
    """Runs all tasks and seeds, then writes scores, a table and a picture.

    Args:
      config: the configuration that the arguments make.
      argv: the arguments themselves, which are passed on to the runs.

    Raises:
      ConfigError: the runs cannot be started with these settings.
      RunError: some of them have failed.
    """
    folder = Path(config.logdir)
    if config.suite.table_only:
        if not folder.is_dir():
            raise ConfigError(f"logdir: expected a folder with runs, got {folder}.")
        write_results(folder)
        return
    runs, example = plan_runs(config, argv)
    _prepare(folder, argv)
    with open_slots(example, config.suite.at_once, config.suite.mps) as slots:
        failed = _work(runs, slots)
    write_results(folder)
    if failed:
        names = ", ".join(run.name for run in failed)
        raise RunError(
            f"{len(failed)} of {len(runs)} runs have failed: {names}. {FAILED} in the "
            "folder of each says why; the same command tries them again."
        )


def plan_runs(
    config: elements.Config, argv: Sequence[str]
) -> tuple[list[SuiteRun], elements.Config]:
    """Makes the runs of a suite, seed by seed, so that every task has a run early.

    Returns:
      The runs, and the configuration of the first.

    Raises:
      ConfigError: a run would refuse its configuration.
    """
    presets = make_presets()
    preset = presets.get(config.suite.preset, Preset((), (), (config.task,)))
    chosen = tuple(config.suite.tasks)
    tasks = preset.tasks if chosen == ALL else tuple(dict.fromkeys(chosen))
    arguments, _ = split_arguments(argv)
    if config.suite.preset in presets and "task" in dict(arguments):
        raise ConfigError(
            f"task: expected none with --suite.preset {config.suite.preset}, which has "
            f"its own, got {config.task}. Choose among them with --suite.tasks."
        )
    blocks = [name for flag, names in arguments if flag == "configs" for name in names]
    blocks = [*preset.configs, *blocks]
    common = [*(["--configs", *blocks] if blocks else []), *preset.flags]
    common += _passed_on(arguments)
    folders = _folders(config.logdir, tasks)
    runs: list[SuiteRun] = []
    example: elements.Config | None = None
    for task in tasks:
        own = ["--task", task, "--script", config.suite.script]
        checked = load_config([*common, *own])
        _check_run(checked)
        example = example or checked
        for seed in range(config.seed, config.seed + config.suite.seeds):
            logdir = Path(folders[task], f"seed{seed}")
            place = ["--seed", str(seed), "--logdir", str(logdir)]
            runs.append(
                SuiteRun(
                    task=task,
                    seed=seed,
                    logdir=logdir,
                    argv=(*common, *own, *place),
                    steps=checked.run.steps,
                    repeat=action_repeat(checked.flat),
                )
            )
    assert example is not None
    runs.sort(key=lambda run: run.seed)
    return runs, example


def _passed_on(arguments: Sequence[tuple[str, list[str]]]) -> Iterator[str]:
    for name, values in arguments:
        if name not in OWN_FLAGS and not name.startswith("suite."):
            yield f"--{name}"
            yield from values


def _check_run(config: elements.Config) -> None:
    if "jsonl" not in config.logger.outputs:
        raise ConfigError(
            "logger.outputs: expected jsonl among them for --script suite, which reads "
            f"the scores of its runs, got {list(config.logger.outputs)}."
        )
    if config.replicas > 1:
        raise ConfigError(
            f"replicas: expected 1 for --script suite, got {config.replicas}."
        )


def _folders(logdir: str, tasks: Sequence[str]) -> dict[str, str]:
    """Returns a folder for each task, whose own name may contain slashes."""
    folders = {task: fill_logdir(f"{logdir}/{{task}}", task, 0) for task in tasks}
    if len(set(folders.values())) < len(folders):
        raise ConfigError(
            "suite.tasks: expected names that differ in more than punctuation, got "
            f"{', '.join(tasks)}."
        )
    return folders


def _prepare(folder: Path, argv: Sequence[str]) -> None:
    """Claims the folder and records in it how the suite was started."""
    if (folder / FILENAME).exists():
        raise ConfigError(
            f"logdir: expected a folder for a suite, got {folder}, which is that of a "
            "run. Choose another --logdir."
        )
    with as_config_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        claim(folder)
    note = {
        "command": shlex.join(["dreamerv3", *argv]),
        "version": package_version(),
        "commit": _commit(),
    }
    write_file(folder, "suite.json", f"{json.dumps(note, indent=1)}\n".encode())


def _commit() -> str | None:
    """Returns the commit of this code, or None if it is not a git checkout."""
    root = Path(__file__).parents[2]
    if not (root / ".git").exists():
        return None
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _work(runs: Sequence[SuiteRun], slots: Sequence[Slot]) -> list[SuiteRun]:
    """Runs the queue; returns the runs that have failed."""
    with stop_on_signals(INTERRUPTED) as interrupted, SuiteDisplay() as display:
        todo = RunQueue(runs, slots, display.note)
        devices = dict.fromkeys(slot.device for slot in slots)
        display.note(
            f"{len(runs)} runs, {len(slots)} at a time on {', '.join(devices)} (Ctrl-C "
            "saves and stops; the same command continues)."
        )
        todo.work(interrupted, lambda: display.show(todo))
        display.note(status_line(todo))
    return [run for run in todo.runs if run.state == "failed"]


def write_results(folder: Path) -> None:
    """Writes scores, table and picture of the runs in a folder, and shows the table."""
    runs, problems = score_table.find_runs(folder)
    tasks = score_table.group_by_task(runs)
    notes = [*problems, *_failures(folder)]
    score_table.write_tables(folder, tasks, notes)
    print((folder / "table.md").read_text("utf-8"))
    written = ["scores.csv", "table.json", "table.md"]
    try:
        plot.render([run.logdir for run in runs], folder / PICTURE)
        written.append(PICTURE)
    except PlotError as error:
        print(f"No picture: {error}")
    print(f"Written to {folder}: {', '.join(written)}.")


def _failures(folder: Path) -> Iterator[str]:
    for path in sorted(folder.glob(f"*/*/{FAILED}")):
        content = json.loads(path.read_text("utf-8"))
        last = content["output"][-1] if content["output"] else "it printed nothing."
        yield (
            f"{content['task']} seed {content['seed']} has failed at step "
            f"{content['step']:,}: {last}"
        )
