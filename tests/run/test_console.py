"""Messages are printed once, whatever libraries do to the root logger."""

import contextlib
import io
import logging
import subprocess
import sys

import pytest

from embodied.run.console import show_messages

LOG = logging.getLogger("embodied.run")


@pytest.fixture
def root_handler():
    """Adds handlers to the root logger, as libraries do on import."""
    added = []

    def add(handler):
        added.append(handler)
        logging.getLogger().addHandler(handler)
        return handler

    yield add
    for handler in added:
        logging.getLogger().removeHandler(handler)


def test_a_handler_that_prints_does_not_print_again(root_handler, capsys):
    with show_messages():
        root_handler(logging.StreamHandler(sys.stderr))
        root_handler(logging.StreamHandler(sys.stdout))
        LOG.info("once")
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("once\n", "")


def test_other_handlers_get_messages_of_their_level(root_handler, capsys):
    everything = root_handler(logging.StreamHandler(io.StringIO()))
    warnings = root_handler(logging.StreamHandler(io.StringIO()))
    warnings.setLevel(logging.WARNING)
    with show_messages():
        LOG.info("one")
        LOG.warning("two")
    assert everything.stream.getvalue() == "one\ntwo\n"
    assert warnings.stream.getvalue() == "two\n"
    assert capsys.readouterr().out == "one\nWARNING: two\n"


def test_propagation_is_as_before_at_the_end(root_handler):
    log = logging.getLogger("embodied")
    with show_messages(), show_messages():
        assert not log.propagate
    assert log.propagate
    handler = root_handler(logging.StreamHandler(io.StringIO()))
    LOG.warning("later")
    assert handler.stream.getvalue() == "later\n"


def test_the_logging_of_dm_control_does_not_repeat_messages():
    pytest.importorskip("absl.logging")
    code = (
        "import logging\n"
        "from embodied.run.console import show_messages\n"
        "with show_messages():\n"
        "    from absl import logging as absl_logging\n"
        "    absl_logging.use_absl_handler()\n"  # As importing dm_control does.
        "    absl_logging.set_verbosity(absl_logging.INFO)\n"
        "    logging.getLogger('embodied').warning('once')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60
    )
    assert (done.stdout, done.stderr) == ("WARNING: once\n", "")


def test_a_message_that_cannot_be_printed_ends_nothing(root_handler, monkeypatch):
    other = root_handler(logging.StreamHandler(io.StringIO()))
    with open("/dev/full", "w") as full, show_messages():
        monkeypatch.setattr(sys, "stdout", full)
        LOG.warning("one")
        monkeypatch.undo()
        with contextlib.suppress(OSError):  # What it could not write before.
            full.close()
    assert other.stream.getvalue() == "one\n"
