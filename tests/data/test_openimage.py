"""OpenImage in the form in which FedScale gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedtangent._src.data import load

from .originals import OPENIMAGE_HEAD as HEAD
from .originals import write_openimage


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """Its folder."""
    folder = tmp_path / "openImg"
    write_openimage(folder)
    return folder


def test_images_and_their_uploaders(made: Path, tmp_path: Path) -> None:
    found = load("openimage", tmp_path, image_size=6)
    assert found.x_train.shape == (12, 6, 6, 3) and found.x_test.shape == (4, 6, 6, 3) and found.num_classes == 5
    rng = np.random.default_rng(0)
    shades = [rng.integers(0, 256, 3, dtype=np.uint8) for _ in range(16)]
    both = np.concatenate([found.x_train, found.x_test])
    np.testing.assert_allclose(both, np.broadcast_to(np.array(shades)[:, None, None] / 255, both.shape), atol=1e-6)
    assert found.y_train.tolist() == [i % 5 for i in range(12)]
    assert found.user_train.tolist() == [0, 1, 2] * 4 and found.user_test.tolist() == [0, 1, 2, 0]
    two = load("openimage", made, image_size=2, num_users=2, num_test=3)
    assert two.user_train.tolist() == [0, 1] * 4 and len(two.y_test) == 3 and two.num_classes == 5
    assert two.user_test.tolist() == [0, 1, 2]  # the last one only tests
    assert load("openimage", made, image_size=2, flatten=True).x_train.shape == (12, 12)


def test_uploaders_are_numbered_by_their_names_alone(made: Path) -> None:
    """Names of one number, such as 1 and 01, have one order too, and those who only test come last."""
    names = ["9", "1", "0001", "b", "01", "10", "00001", "001", "a", "2", "³", "1"]
    for split, of_split in (("train", names), ("test", ["zz", "2", "0002", "1"])):
        lines = [f"{name},{split}{i}.png,thing,0\n" for i, name in enumerate(of_split)]
        (made / "client_data_mapping" / f"{split}.csv").write_bytes(
            ("\ufeff" + HEAD + "".join(lines)).replace("\n", "\r\n").encode()
        )
    ordered = ["00001", "0001", "001", "01", "1", "2", "9", "10", "a", "b", "³", "0002", "zz"]
    found = load("openimage", made, image_size=2)
    assert [ordered[i] for i in found.user_train] == names
    assert [ordered[i] for i in found.user_test] == ["zz", "2", "0002", "1"]


def test_scaling_is_bilinear_over_the_image(made: Path) -> None:
    ramp = np.repeat(np.arange(0, 256, 16, dtype=np.uint8)[None, :, None], 16, axis=0).repeat(3, axis=2)
    Image.fromarray(ramp).save(made / "train" / "train0.png")
    row = load("openimage", made, image_size=4).x_train[0, 0, :, 0]
    assert (np.diff(row) > 0.2).all() and abs(row.mean() - ramp.mean() / 255) < 0.01


def test_what_is_refused(made: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"openimage: needs the files of https://.*openImage\.tar\.gz \(66 GB\)"):
        load("openimage")
    with pytest.raises(ValueError, match=r"has no client_data_mapping/train\.csv and test\.csv"):
        load("openimage", tmp_path / "openImg" / "train")
    with pytest.raises(ValueError, match="num_users: got 4, must be a whole number from 1 to 3"):
        load("openimage", made, num_users=4)
    with pytest.raises(ValueError, match="image_size: got 0"):
        load("openimage", made, image_size=0)
    (made / "train" / "train3.png").unlink()
    with pytest.raises(ValueError, match=r"train3\.png cannot be read: .*No such file"):
        load("openimage", made)
    table = made / "client_data_mapping" / "test.csv"
    for text, says in (
        ("", "cannot be read"),
        (HEAD + "1,a.png\n", "in line 2"),
        (HEAD + "1,a.png,thing,²\n", "in line 2"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=says):
            load("openimage", made)
