"""A client that cannot open a link tries again, or fails all who wait for it."""

from __future__ import annotations

import errno

import pytest
from waiting_testing import WAIT

from embodied.rpc import Client, Disconnected, Server, free_port
from embodied.rpc.client import Caller


class Failing(Caller):
    """Its attempts to open a link raise the errors of a list, as long as there are."""

    errors: list

    def _open_link(self):
        if self.errors:
            raise self.errors.pop()
        return super()._open_link()


def make_client(addr, *errors):
    class Chosen(Failing):
        pass

    class ChosenClient(Client):
        CALLER = Chosen

    Chosen.errors = list(errors)
    return ChosenClient(addr)


def test_a_shortage_of_descriptors_is_survived(caplog):
    port = free_port()
    server = Server(port)
    server.bind("echo", lambda x: x)
    shortage = OSError(errno.EMFILE, "Too many open files")
    with server, make_client(port, *[shortage] * 3) as client:
        client.connect(WAIT)
        assert client.echo(5).result(WAIT) == 5
    assert "Too many open files" in caplog.text


def test_any_other_failure_is_told_to_all_who_wait():
    with make_client(free_port(), KeyError("what")) as client:
        with pytest.raises(Disconnected, match=r"the connection to .* failed: 'what'"):
            client.connect(WAIT)
        with pytest.raises(Disconnected, match="failed"):
            client.echo(5)


@pytest.mark.parametrize("link", ["auto", "remote"])
def test_an_address_that_cannot_be_one_is_an_error(link):
    with Client("http://host:5000", link=link) as client:
        with pytest.raises(Disconnected, match="http://host:5000 failed"):
            client.connect(WAIT)
