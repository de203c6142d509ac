"""Data sets: what is in them, how a batch is made of them, and what is said if they are missing or damaged."""

import gzip

import pytest
import torch

from trainer import datasets
from trainer.config import DATASETS, TrainConfig
from trainer.datasets import IDX_FILES, Split, check, check_idx, load, raw_folder
from trainer.datasets import drawn as drawing
from trainer.errors import UserError

DIGITS_SHA256 = "c919f97cc7cf8133853f56193dc9589ed8f33e5f10ffbf06498a10cd52b2179b"


@pytest.fixture(scope="module")
def digits():
    return load(TrainConfig(dataset="digits"))


@pytest.fixture
def drawn(tmp_path):
    """A small drawn data set and the configuration that names it."""
    drawing.make(100, 20, 1, tmp_path / "drawn-digits")
    return TrainConfig(dataset="drawn-digits", data_dir=str(tmp_path))


def test_digits_are_split_four_to_one_and_nothing_is_in_both(digits):
    assert (len(digits.train), len(digits.validation), digits.classes) == (1438, 359, 10)
    train, validation = (
        {bytes(image) for image in split.images.flatten(1).numpy()} for split in (digits.train, digits.validation)
    )
    assert not train & validation


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_split_of_digits_holds_every_digit(digits, split):
    counts = torch.bincount(getattr(digits, split).labels, minlength=10)
    assert len(counts) == 10
    assert counts.min() > 20


def test_digits_are_normalised(digits):
    images = digits.train.batch(torch.arange(len(digits.train))).images
    assert images.mean().abs() < 0.01
    assert (images.std() - 1).abs() < 0.01


def test_the_hash_of_digits_never_changes(digits):
    assert digits.sha256() == DIGITS_SHA256
    assert load(TrainConfig(dataset="digits")).sha256() == DIGITS_SHA256


def test_the_hash_of_a_data_set_sees_every_pixel_and_label(digits):
    images, labels = digits.train.images.clone(), digits.train.labels.clone()
    images[7, 3, 3] ^= 1
    labels[7] = (labels[7] + 1) % 10
    for train in (
        Split(images, digits.train.labels, digits.train.scale, digits.train.shift),
        Split(digits.train.images, labels, digits.train.scale, digits.train.shift),
    ):
        assert datasets.Dataset("other", train, digits.validation).sha256() != DIGITS_SHA256


def test_a_batch_is_what_its_samples_are_one_by_one(digits):
    indices = torch.tensor([5, 0, 1437, 5])
    batch = digits.train.batch(indices)
    assert (batch.images.shape, batch.images.dtype) == ((4, 1, 8, 8), torch.float32)
    assert (batch.labels.shape, batch.labels.dtype) == ((4,), torch.int64)
    for place, index in enumerate(indices):
        pixels = digits.train.images[index].float() / 16
        assert torch.allclose(batch.images[place, 0], (pixels - 0.3058) / 0.3764, atol=1e-6)
        assert batch.labels[place] == digits.train.labels[index]
        assert torch.equal(digits.train.batch(index[None]).images[0], batch.images[place])


def test_making_a_batch_leaves_the_pixels_alone(digits):
    digits.train.batch(torch.arange(64))
    assert digits.sha256() == DIGITS_SHA256


def test_drawn_digits_are_read_and_normalised(drawn):
    check(drawn)
    data = load(drawn)
    assert (data.name, len(data.train), len(data.validation)) == ("drawn-digits", 100, 20)
    images = data.train.batch(torch.arange(100)).images
    assert images.shape == (100, 1, 28, 28)
    assert images.mean().abs() < 0.05
    assert (images.std() - 1).abs() < 0.05


def test_a_batch_larger_than_the_training_split_is_refused(drawn):
    with pytest.raises(UserError, match=r"--batch-size 101 .* 100 training samples .* HINT: --batch-size 100"):
        load(TrainConfig(dataset="drawn-digits", data_dir=drawn.data_dir, batch_size=101))


@pytest.mark.parametrize("name", [name for name in DATASETS if name != "digits"])
def test_missing_data_is_named_with_the_way_to_get_it(name, tmp_path):
    config = TrainConfig(dataset=name, data_dir=str(tmp_path))
    for look in (check, load):
        with pytest.raises(UserError, match=f"Data set {name} is missing: no train-images.* HINT: ") as caught:
            look(config)
        wanted = f"trainer data make drawn-digits --out {tmp_path}" if name == "drawn-digits" else "--download"
        assert wanted in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_hint_for_drawn_digits_makes_what_is_missing(tmp_path):
    from trainer import cli

    config = TrainConfig(dataset="drawn-digits", data_dir=str(tmp_path), batch_size=2)
    with pytest.raises(UserError) as caught:
        check(config)
    words = str(caught.value).partition("HINT: trainer ")[2].split()
    assert cli.main([*words, "--train", "2", "--test", "1"]) == 0
    check(config)
    assert len(load(config).train) == 2


def test_digits_are_never_missing(tmp_path):
    check(TrainConfig(dataset="digits", data_dir=str(tmp_path / "nowhere")))


DAMAGE = {
    "cut off": lambda content: content[:-1],
    "too long": lambda content: content + b"\0",
    "cut off in its header": lambda content: content[:6],
    "empty": lambda content: b"",
    "still packed": gzip.compress,
    "of another type of numbers": lambda content: content[:2] + b"\x0d" + content[3:],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("name", IDX_FILES)
def test_a_damaged_file_is_named_before_anything_starts(name, damage, drawn):
    path = raw_folder(drawn) / name
    check_idx(path)
    path.write_bytes(damage(path.read_bytes()))
    for look in (check, load):
        with pytest.raises(UserError, match=f"{name} is damaged: .* HINT: "):
            look(drawn)


def test_a_download_that_fails_is_a_user_error(tmp_path, monkeypatch):
    import torchvision.datasets

    def offline(self):
        raise RuntimeError("Error downloading train-images-idx3-ubyte.gz")

    monkeypatch.setattr(torchvision.datasets.MNIST, "download", offline)
    config = TrainConfig(dataset="mnist", data_dir=str(tmp_path), download=True)
    check(config)
    with pytest.raises(UserError, match=r"Could not download mnist to .*: .* HINT: "):
        load(config)
