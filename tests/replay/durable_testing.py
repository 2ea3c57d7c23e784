"""Helpers for the tests of saved replays."""

from __future__ import annotations

from pathlib import Path

from replay_testing import write_save


def commit(checkpoint, root, replay, meta=None):
    """Saves replay as a conductor does."""
    tag = checkpoint.new_tag()
    data, cut = write_save(replay)
    records = checkpoint.write_part(tag, "replay", data)
    checkpoint.commit(tag, records + cut.records(root), meta)
    return data


def names(folder, kind="*"):
    return {path.name for path in Path(folder, "replay").glob(f"*.{kind}")}


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder, "replay").iterdir()}
