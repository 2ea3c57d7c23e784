"""Keys and addresses: which clients may connect, and where. Any process.

With keys, ZeroMQ sockets are encrypted and both sides of every link prove a key. A run
has one key pair for its servers and one for its clients, kept together in a file that
only its owner can read. Processes of one user on one machine share a file that is made
on first use; roles on other machines need a copy of the run's file (`run.keyfile`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket as sockets
import stat
import struct
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import cast

import zmq
from zmq.utils import z85

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
WILDCARDS = ("0.0.0.0", "[::]")  # Wildcards for all interfaces.


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
        # Unique, since another thread may save to the same path at the same time.
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as file:
                json.dump(asdict(self), file)
            os.link(temporary, path)  # Atomic, and fails if the path exists.
        except FileExistsError:
            raise FileExistsError(
                f"Key file {path} exists and is not overwritten, because copies of "
                "it may be in use. Use it with `Keys.load(path)`, remove it first, or "
                "save to another path."
            ) from None
        finally:
            os.unlink(temporary)

    @classmethod
    def load(cls, path: str | os.PathLike) -> Keys:
        """Reads a key file, which only its owner, this user or root, may access."""
        try:
            with open(path, "rb") as file:
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
        except (ValueError, KeyError, TypeError, struct.error):
            raise AuthError(
                f"Key file {path} is not a valid key file. Make one with "
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


def local_key(keys: Keys | None) -> bytes:
    """Returns the secret of local links; without keys, only the user is checked."""
    if keys is None:
        return b""
    return hashlib.sha256(b"local link" + z85.decode(keys.server_secret)).digest()


def prove(key: bytes, *words: bytes) -> bytes:
    """Returns a digest of the words that only holders of the key can compute."""
    return hmac.digest(key, b"\0".join(words), "sha256")


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


class ZapHandler:
    """Tells libzmq whether the key of a handshake is allowed (ZAP, RFC 27).

    Owned by the thread that calls `handle`. It must exist before the server's socket
    binds, since libzmq accepts every key while it has no gate to ask.
    """

    def __init__(self, context: zmq.Context, keys: Keys):
        self._allowed = {z85.decode(key) for key in keys.allowed}
        self._socket = context.socket(zmq.REP)
        self._socket.linger = 0
        self._socket.bind(ZAP_ENDPOINT)
        self.refused = 0  # Number of refused handshakes.
        # Becomes readable when there is something to handle.
        self.fileno = cast(int, self._socket.get(zmq.FD))

    def handle(self, _: int = 0) -> None:
        """Answers all handshakes that wait."""
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            # Version, request, domain, address, identity, mechanism, key.
            good = parts[5:6] == [b"CURVE"] and parts[6] in self._allowed
            self.refused += not good
            answer = [b"200", b"OK"] if good else [b"400", b"key not allowed"]
            self._socket.send_multipart([*parts[:2], *answer, b"", b""])

    def close(self) -> None:
        """Closes the socket."""
        self._socket.close()


def parse_address(addr: str | int) -> tuple[str, int]:
    """Splits 'host:port', '[::1]:port' or a port into host and port."""
    text = str(addr).removeprefix("tcp://")
    host, _, port = text.rpartition(":")
    host = host or "localhost"
    if not port.isdigit() or not 0 <= int(port) < 1 << 16:
        raise ValueError(f"Expected an address HOST:PORT or a port, got {addr!r}.")
    return host, int(port)


def bind_address(
    addr: str | int, keys: Keys | None, insecure: bool, advice: str
) -> str:
    """Returns the numeric address to listen at; unsafe choices raise AuthError."""
    host, port = parse_address(addr)
    numeric = resolve(host)
    loopback = ipaddress.ip_address(numeric.strip("[]")).is_loopback
    if not loopback and keys is None and not insecure:
        raise AuthError(f"{addr} can be reached from other machines: {advice}")
    return f"{numeric}:{port}"


def check_free(addr: str) -> None:
    """Raises ValueError if nobody can listen at a numeric address now."""
    host, port = parse_address(addr)
    family = sockets.AF_INET6 if host.startswith("[") else sockets.AF_INET
    with sockets.socket(family) as probe:
        probe.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
        except OSError as error:
            raise ValueError(
                f"A server cannot listen at {addr}: {error.strerror}. Choose another "
                "address of this machine, or end the program that uses it."
            ) from None


def connect_address(addr: str | int) -> str:
    """Returns the address to connect to."""
    host, port = parse_address(addr)
    return f"{'127.0.0.1' if host == 'localhost' else host}:{port}"


def free_port(host: str = "127.0.0.1") -> int:
    """Returns an unused port of an interface, by default of loopback."""
    family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
    with sockets.socket(family) as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]


def own_addresses(addr: str, look_up: bool) -> list[str]:
    """Returns addresses of this machine at which a server known as `addr` may listen.

    Empty if `addr` is another machine, which may have a server at the same port, or a
    host name that cannot be resolved or, without `look_up`, may not be.
    """
    host, port = parse_address(addr)
    try:
        if not look_up:
            ipaddress.ip_address(host.strip("[]"))
        host = resolve(host)
        family = sockets.AF_INET6 if ":" in host else sockets.AF_INET
        with sockets.socket(family, sockets.SOCK_DGRAM) as probe:
            probe.bind((host.strip("[]"), 0))  # Fails for other machines' addresses.
    except (OSError, ValueError):
        return []
    return [f"{host}:{port}", f"{WILDCARDS[0]}:{port}"]


def resolve(host: str) -> str:
    """Returns the numeric address of a host, in brackets for IPv6."""
    if host == "localhost":
        return "127.0.0.1"
    if host in ("*", "0.0.0.0"):
        return "0.0.0.0"
    try:
        found = sockets.getaddrinfo(host.strip("[]"), None)
    except OSError as error:
        raise ValueError(f"Cannot resolve host {host!r}: {error}.") from None
    # Clients look a name up, too, and prefer IPv4 as well.
    family, _, _, _, where = min(found, key=lambda x: x[0] == sockets.AF_INET6)
    return f"[{where[0]}]" if family == sockets.AF_INET6 else str(where[0])


def needs_ipv6(addr: str) -> bool:
    """Returns whether a host has no IPv4 address; False if it is not known now."""
    host, _ = parse_address(addr)
    with contextlib.suppress(ValueError):  # A number need not be looked up.
        return ipaddress.ip_address(host.strip("[]")).version == 6
    with contextlib.suppress(ValueError):
        return resolve(host).startswith("[")
    return False
