"""Who may connect: CURVE keys, key files, and the check of every handshake.

Every socket is encrypted and both sides prove a key. A run has one key pair for its
servers and one for its clients, kept together in a file that only its owner can
read. Processes of one user on one machine share a file that is made on first use;
roles on other machines are given a copy of the run's file (`run.keyfile`).
"""

from __future__ import annotations

import json
import os
import secrets
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"


class AuthError(ConnectionError):
    """A key is missing, unsafe, or was refused."""


@dataclass(frozen=True)
class Keys:
    """The Z85 key pairs of one run; `allowed` lists the clients' public keys."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str
    allowed: tuple[str, ...]

    def __repr__(self) -> str:
        return f"Keys(server_public={self.server_public!r})"  # Never the secrets.

    @classmethod
    def generate(cls) -> Keys:
        """Makes new key pairs."""
        server_public, server_secret = zmq.curve_keypair()
        client_public, client_secret = zmq.curve_keypair()
        return cls(
            server_public.decode(),
            server_secret.decode(),
            client_public.decode(),
            client_secret.decode(),
            (client_public.decode(),),
        )

    def save(self, path: str | os.PathLike) -> None:
        """Writes a new file of mode 0600.

        Raises:
          FileExistsError: the file exists; keys are never overwritten.
        """
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Another one in every thread that does the same at the same time.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(self), file)
            os.link(temporary, path)  # Fails if it exists, and is never half a file.
        except FileExistsError:
            raise FileExistsError(
                f"Key file {path} exists and is left as it is, since others may have "
                "copies of it. Use it with `Keys.load(path)`, remove it first, or save "
                "to another path."
            ) from None
        finally:
            os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Keys:
        """Reads a key file, which must belong to this user and be of mode 0600."""
        try:
            with open(path) as file:
                status = os.fstat(file.fileno())
                content = file.read(1 << 16)
        except OSError as error:
            raise AuthError(
                f"Cannot read key file {path}: {error.strerror}. Copy it from the "
                "machine of the run, or make one with `Keys.generate().save(path)`."
            ) from None
        mode = stat.S_IMODE(status.st_mode)
        if mode & 0o077:
            raise AuthError(
                f"Key file {path} has mode {mode:04o}, so others could read it. "
                f"Expected 0600: run `chmod 600 {path}`, and make new keys if others "
                "had access."
            )
        if status.st_uid not in (os.getuid(), 0):
            raise AuthError(
                f"Key file {path} belongs to user {status.st_uid}, expected "
                f"{os.getuid()}. Copy it so that it is your own."
            )
        try:
            data = json.loads(content)
            names = [field.name for field in fields(cls) if field.name != "allowed"]
            pairs = {name: str(data[name]) for name in names}
            allowed = tuple(str(key) for key in data["allowed"])
            for key in (*pairs.values(), *allowed):
                if len(z85.decode(key)) != 32:
                    raise ValueError("a key of the wrong length")
        except (ValueError, KeyError, TypeError):
            raise AuthError(
                f"Key file {path} is not one of ours. Make one with "
                "`Keys.generate().save(path)`."
            ) from None
        return cls(**pairs, allowed=allowed)

    @classmethod
    def default(cls) -> Keys:
        """The keys of this user on this machine, made on first use."""
        base = os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config"
        path = Path(base) / "embodied" / "keys.json"
        if not path.exists():
            try:
                cls.generate().save(path)
            except FileExistsError:
                pass  # Another process was first.
            except OSError as error:
                raise AuthError(
                    f"Cannot write key file {path}: {error.strerror}. Set "
                    "XDG_CONFIG_HOME to a folder that can be written."
                ) from None
        return cls.load(path)


def secure_server(socket: zmq.Socket, keys: Keys) -> None:
    """Makes a server's socket accept only clients that prove an allowed key."""
    socket.curve_server = True
    socket.curve_publickey = keys.server_public.encode()
    socket.curve_secretkey = keys.server_secret.encode()
    socket.zap_domain = b"embodied"


def secure_client(socket: zmq.Socket, keys: Keys) -> None:
    """Makes a client's socket prove its key and accept only the run's servers."""
    socket.curve_serverkey = keys.server_public.encode()
    socket.curve_publickey = keys.client_public.encode()
    socket.curve_secretkey = keys.client_secret.encode()


class Gate:
    """Answers libzmq's question whether a handshake's key is allowed (ZAP, RFC 27).

    Owned by the thread that calls `handle`. It must exist before the server's socket
    binds, since libzmq lets everyone in where nobody answers.
    """

    def __init__(self, context: zmq.Context, keys: Keys):
        self._allowed = {z85.decode(key) for key in keys.allowed}
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self.refused: dict[str, int] = {}  # Count by address, bounded.
        # Becomes readable when there is something to handle.
        self.fileno = cast(int, self._socket.get(zmq.FD))

    def handle(self) -> None:
        """Answers all handshakes that wait."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            version, request = parts[0], parts[1] if len(parts) > 1 else b""
            address = parts[3].decode(errors="replace") if len(parts) > 3 else "?"
            mechanism, key = (parts[5], parts[6]) if len(parts) > 6 else (b"", b"")
            good = mechanism == b"CURVE" and key in self._allowed
            if not good:
                if address not in self.refused and len(self.refused) >= 1000:
                    address = "others"
                self.refused[address] = self.refused.get(address, 0) + 1
            code, text = (b"200", b"OK") if good else (b"400", b"key not allowed")
            self._socket.send_multipart([version, request, code, text, b"", b""])

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()
