"""The trusted key server of CP-NTK-FL: one secret seed, sealed to each client's public key (Yue et al., 2022).

Each client makes a key pair and publishes the public half; the key server draws the seed of the random projection and
sends to every client a box that only that client can open (libsodium's sealed boxes: X25519 and XSalsa20-Poly1305, by
PyNaCl). The aggregation server sees neither the seed nor a private key, and takes no part in the exchange.

Secrets are stored in ``Secret``, which never prints its bytes and cannot be pickled; no error message shows them.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

from fedtangent._src.federated.wire.ledger import KEY_BYTES, SEALED_BYTES, key_exchange_bytes
from fedtangent._src.types import Algorithm, Cost, FederatedData, wrapped

SEED_BYTES, SALT_BYTES = 32, 16
_HEADER = "fedtangent key file 1"


class Secret:
    """Secret bytes that are not shown by accident: only ``reveal`` returns them."""

    __slots__ = ("_value",)

    def __init__(self, value: bytes) -> None:
        self._value = bytes(value)

    def reveal(self) -> bytes:
        """Returns the secret bytes."""
        return self._value

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and secrets.compare_digest(self._value, other._value)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("a Secret cannot be pickled or copied")


class KeyPair(NamedTuple):
    """A client's public and private key."""

    public: bytes  # [32], to be published
    private: Secret


class KeyFile(NamedTuple):
    """The contents of a key file: the secret seed, and a salt (random bytes) for ``digest``."""

    seed: Secret
    salt: bytes

    @property
    def digest(self) -> str:
        """The salt and the first 16 bytes of the seed's salted SHA-256, as "salt:hash" in hexadecimal.

        Digests with one salt tell seeds apart without revealing them.
        """
        hashed = hashlib.sha256(b"fedtangent projection seed" + self.salt + self.seed.reveal()).hexdigest()
        return f"{self.salt.hex()}:{hashed[:32]}"


_drawn: ContextVar[dict[Path, KeyFile] | None] = ContextVar("_drawn", default=None)  # new key files, not written yet


def generate_keys() -> KeyPair:
    """Generates a new key pair for a client, from the operating system's randomness."""
    from nacl.public import PrivateKey

    private = PrivateKey.generate()
    return KeyPair(bytes(private.public_key), Secret(bytes(private)))


def draw_seed() -> Secret:
    """Draws a new seed of 256 bits from the operating system's randomness."""
    return Secret(secrets.token_bytes(SEED_BYTES))


def seal_seed(seed: Secret, public_key: bytes) -> bytes:
    """Returns the key server's message to one client: ``seed`` in a box for that client's public key, 80 bytes.

    Args:
        seed: The seed, 32 bytes.
        public_key: Public key of the client, 32 bytes.

    Raises:
        ValueError: A seed of another length, or a public key that is invalid.
    """
    from nacl.exceptions import CryptoError
    from nacl.public import PublicKey, SealedBox

    _check_bytes("public_key", public_key, KEY_BYTES)
    if not isinstance(seed, Secret) or len(seed.reveal()) != SEED_BYTES:
        raise ValueError(f"seed: must be a Secret of {SEED_BYTES} bytes")
    try:
        return bytes(SealedBox(PublicKey(public_key)).encrypt(seed.reveal()))
    except (CryptoError, RuntimeError) as error:
        raise ValueError("public_key: got bytes that are no valid key, must be a key from generate_keys") from error


def open_seed(sealed: bytes, keys: KeyPair) -> Secret:
    """Opens a client's sealed box and returns the seed in it.

    Args:
        sealed: The box, 80 bytes.
        keys: The client's keys.

    Raises:
        ValueError: Another client's box, a damaged box, or keys that are no ``KeyPair``.
    """
    from nacl.exceptions import CryptoError
    from nacl.public import PrivateKey, SealedBox

    if not isinstance(keys, KeyPair) or not isinstance(keys.private, Secret):
        raise ValueError("keys: must be a KeyPair, as generate_keys makes one")
    _check_bytes("private_key", keys.private.reveal(), KEY_BYTES)
    _check_bytes("sealed", sealed, SEALED_BYTES)
    try:
        return Secret(SealedBox(PrivateKey(keys.private.reveal())).decrypt(sealed))
    except CryptoError:
        raise ValueError("sealed: does not open with these keys: sealed for another client, or damaged") from None


def hand_out(seed: Secret, clients: Iterable[KeyPair]) -> list[Secret]:
    """Seals the seed to each client, opens each box with the client's keys, and returns the opened seeds in order.

    Args:
        seed: The seed.
        clients: The clients' keys.

    Raises:
        ValueError: A seed of another length than 32 bytes, or invalid keys.
    """
    return [open_seed(seal_seed(seed, keys.public), keys) for keys in clients]


def with_key_exchange(algorithm: Algorithm, num_clients: int) -> Algorithm:
    """Returns ``algorithm`` with the bytes of the key exchange added to its cost before the first round.

    Each client sends a public key and receives a sealed seed.

    Args:
        algorithm: The algorithm.
        num_clients: Clients N.
    """
    up, down = key_exchange_bytes(num_clients)

    def charged(cost: Cost, data: FederatedData) -> Cost:
        return cost._replace(uplink_once=cost.uplink_once + up, downlink_once=cost.downlink_once + down)

    return wrapped(algorithm, algorithm.name, charged)


def open_key_file(path: str | os.PathLike[str]) -> KeyFile:
    """Reads the key file at ``path``; makes a missing file, with a new random seed and readable by its owner only.

    In a ``written_at_the_end`` block a missing file is made only at the end of the block.

    Args:
        path: Path of the file.

    Raises:
        ValueError: A file that others can read, that is not a key file, or that cannot be read or made.
    """
    place = Path(path)
    try:
        unwritten = _drawn.get()
        if not place.exists():
            new = KeyFile(draw_seed(), secrets.token_bytes(SALT_BYTES))
            if unwritten is not None:
                return unwritten.setdefault(place, new)
            _create(place, new.seed, new.salt)
        return _read(place)
    except OSError as error:
        reason = error.strerror if place.parent.is_dir() else f"there is no folder {place.parent}"
        raise ValueError(f"key_file: cannot use {place}: {reason}") from error


@contextlib.contextmanager
def written_at_the_end() -> Iterator[None]:
    """Delays the writing of new key files to the end of a ``with`` block; after an exception none is written.

    Raises:
        ValueError: A key file cannot be made, or another process has made it in the meantime.
    """
    unwritten: dict[Path, KeyFile] = {}
    before = _drawn.set(unwritten)
    try:
        yield
    finally:
        _drawn.reset(before)
    for path, key_file in unwritten.items():
        if not path.exists():
            try:
                _create(path, key_file.seed, key_file.salt)
            except OSError as error:
                raise ValueError(f"key_file: cannot use {path}: {error.strerror}") from error
        if open_key_file(path) != key_file:
            raise ValueError(f"key_file: got {path}, which another process has just created: run the command again")


def _create(path: Path, seed: Secret, salt: bytes) -> None:
    """Writes a new key file as a whole or not at all; if the file exists by now, it is left unchanged."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(f"{_HEADER}\nsalt {salt.hex()}\nseed {seed.reveal().hex()}\n")
        with contextlib.suppress(FileExistsError):
            os.link(name, path)
    finally:
        os.unlink(name)


def _read(path: Path) -> KeyFile:
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        raise ValueError(f"key_file: {path} is not a file")
    if mode & 0o077:
        raise ValueError(f"key_file: others may read {path}; make it yours alone with chmod 600")
    lines = path.read_bytes().decode("ascii", "replace").splitlines()
    parts = [line.split(" ") for line in lines[1:]]
    if len(lines) == 3 and lines[0] == _HEADER and [part[0] for part in parts] == ["salt", "seed"]:
        try:
            salt, seed = (bytes.fromhex(part[1]) for part in parts)
        except (ValueError, IndexError):
            salt = seed = b""
        if (len(salt), len(seed)) == (SALT_BYTES, SEED_BYTES):
            return KeyFile(Secret(seed), salt)
    raise ValueError(f"key_file: {path} is not a key file of fedtangent, or is damaged")


def _check_bytes(name: str, value: object, length: int) -> None:
    if not isinstance(value, bytes) or len(value) != length:
        got = f"{len(value)} bytes" if isinstance(value, bytes) else f"a {type(value).__name__}"
        raise ValueError(f"{name}: got {got}, must be {length} bytes")
