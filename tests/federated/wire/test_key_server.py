"""The key server: only the client that a seed was sealed for can open it, and nothing secret is shown or kept."""

from __future__ import annotations

import copy
import os
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
from nacl.public import PrivateKey, SealedBox

from fedtangent._src.engine.checkpoints.options import plain
from fedtangent._src.federated.wire import key_server
from fedtangent._src.federated.wire.key_server import (
    KeyPair,
    Secret,
    draw_seed,
    generate_keys,
    open_key_file,
    open_seed,
    seal_seed,
)
from fedtangent._src.output.files import write_json


def test_every_client_opens_its_own_box_and_no_other() -> None:
    seed, clients = draw_seed(), [generate_keys() for _ in range(3)]
    boxes = [seal_seed(seed, keys.public) for keys in clients]
    assert len({*boxes}) == 3 and all(len(box) == key_server.SEALED_BYTES for box in boxes)
    assert all(open_seed(box, keys) == seed for box, keys in zip(boxes, clients, strict=True))
    assert key_server.hand_out(seed, clients) == [seed] * 3
    assert seal_seed(seed, clients[0].public) != boxes[0]  # sealed anew: a box does not tell that the seed is the same
    assert all(seed.reveal() not in box for box in boxes)
    with pytest.raises(ValueError, match=r"sealed: does not open with these keys: sealed for another client"):
        open_seed(boxes[0], clients[1])
    # independently: libsodium's own box opens to the same bytes
    assert SealedBox(PrivateKey(clients[2].private.reveal())).decrypt(boxes[2]) == seed.reveal()


@pytest.mark.parametrize("at", [0, 40, 79])
def test_a_damaged_box_is_refused(at: int) -> None:
    keys = generate_keys()
    box = bytearray(seal_seed(draw_seed(), keys.public))
    box[at] ^= 1
    with pytest.raises(ValueError, match="sealed: does not open with these keys") as error:
        open_seed(bytes(box), keys)
    assert error.value.__cause__ is None


def test_malformed_keys_are_refused_and_not_told() -> None:
    keys, seed = generate_keys(), draw_seed()
    box = seal_seed(seed, keys.public)
    cases: list[tuple[Any, str]] = [
        (lambda: seal_seed(seed, b"short"), "public_key: got 5 bytes, must be 32 bytes"),
        (lambda: seal_seed(seed, "x" * 32), "public_key: got a str, must be 32 bytes"),  # type: ignore[arg-type]
        (lambda: seal_seed(seed, bytes(32)), "public_key: got bytes that are no valid key"),  # a point of small order
        (lambda: seal_seed(Secret(b"abc"), keys.public), "seed: must be a Secret of 32 bytes"),
        (lambda: seal_seed(seed.reveal(), keys.public), "seed: must be a Secret of 32 bytes"),  # type: ignore[arg-type]
        (lambda: open_seed(box[:-1], keys), "sealed: got 79 bytes, must be 80 bytes"),
        (lambda: open_seed(box, KeyPair(keys.public, Secret(b"private!"))), "private_key: got 8 bytes"),
        (lambda: open_seed(box, keys.private), "keys: must be a KeyPair"),
    ]
    for call, message in cases:
        with pytest.raises(ValueError, match=message) as error:
            call()
        assert "private!" not in str(error.value) and seed.reveal().hex() not in str(error.value)


def test_secrets_do_not_show(tmp_path: Path) -> None:
    keys, seed = generate_keys(), draw_seed()
    secrets = [keys.private.reveal(), seed.reveal()]
    write_json(tmp_path / "config.json", {"keys": keys, "seed": seed, "of": [seed]})
    shown = [repr(keys), str(seed), f"{seed}", repr([seed]), (tmp_path / "config.json").read_text()]
    for text in shown:
        assert "hidden" in text
        assert all(s.hex() not in text and repr(s)[2:-1] not in text and str(list(s)) not in text for s in secrets)
    for hide in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="cannot be pickled or copied"):
            hide(seed)
    with pytest.raises(ValueError, match="got a Secret, allowed are"):
        plain({"seed": seed}, "checkpoints.config")
    with pytest.raises(TypeError, match="unhashable"):
        hash(seed)
    assert seed == Secret(seed.reveal()) and seed != draw_seed() and seed != seed.reveal()


def test_a_key_file_is_made_once_for_its_owner_alone(tmp_path: Path) -> None:
    path = tmp_path / "key"
    made = open_key_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(tmp_path) == ["key"]
    again = open_key_file(path)
    assert again.seed == made.seed and again.digest == made.digest
    other = open_key_file(tmp_path / "other")
    assert other.seed != made.seed and other.digest != made.digest
    assert made.seed.reveal().hex() not in made.digest and "hidden" in repr(made)
    salted = key_server.KeyFile(made.seed, b"x" * 16)
    assert salted.digest.split(":")[1] != made.digest.split(":")[1]  # the salt counts


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        (None, 0o640, "others may read .*; make it yours alone with chmod 600"),
        ("seed 12", 0o600, "is not a key file of fedtangent, or is damaged"),
        ("fedtangent key file 1\nsalt 00\nseed zz\n", 0o600, "is not a key file of fedtangent, or is damaged"),
        ("fedtangent key file 1\nsalt\nseed\n", 0o600, "is not a key file of fedtangent, or is damaged"),
    ],
)
def test_a_key_file_that_is_not_fit(tmp_path: Path, text: str | None, mode: int, message: str) -> None:
    path = tmp_path / "key"
    open_key_file(path)
    if text is not None:
        path.write_text(text)
    path.chmod(mode)
    with pytest.raises(ValueError, match=message):
        open_key_file(path)


def test_a_key_file_that_cannot_be_made(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"key_file: cannot use .*: there is no folder .*nowhere"):
        open_key_file(tmp_path / "nowhere" / "key")
    with pytest.raises(ValueError, match=r"key_file: .* is not a file"):
        open_key_file(tmp_path)
