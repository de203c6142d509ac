"""drawn-digits: the same bytes for the same seed, readable by torchvision, and neither too easy nor too hard."""

import hashlib

import numpy as np
import pytest
import torch
import torchvision.datasets
from torch.nn.functional import avg_pool2d, cross_entropy

from trainer.datasets import IDX, Split, drawn
from trainer.workloads import ConvNet

FIRST_HUNDRED = "fe5c131113b4eecdd13b3b2fa6ecc9000f55826278cd21c9e3cb67da70ef1836"


def sha256(*arrays):
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def split(count, number, *, halved=False):
    images, labels = map(torch.from_numpy, drawn.draw(count, 1, number))
    if halved:
        images = avg_pool2d(images[:, None].float(), 2)[:, 0].round().to(torch.uint8)
    source = IDX["drawn-digits"]
    return Split(images, labels.long(), 1 / (255 * source.std), -source.mean / source.std)


@pytest.fixture(scope="module")
def samples():
    """A training and a test split."""
    return split(7000, 0), split(1000, 1)


def test_the_drawings_of_a_seed_never_change():
    assert sha256(*drawn.draw(100, 1, 0)) == FIRST_HUNDRED


def test_drawing_neither_uses_nor_changes_other_generators():
    np.random.seed(3)
    before = np.random.get_state()[1].copy()
    torch.manual_seed(3)
    first = torch.initial_seed(), torch.get_rng_state()
    assert sha256(*drawn.draw(100, 1, 0)) == FIRST_HUNDRED
    assert (before == np.random.get_state()[1]).all()
    assert torch.initial_seed() == first[0]
    assert torch.equal(torch.get_rng_state(), first[1])


@pytest.mark.parametrize(("seed", "number"), [(2, 0), (1, 1)], ids=["another seed", "the other split"])
def test_other_arguments_draw_other_digits(seed, number):
    assert sha256(*drawn.draw(100, seed, number)) != FIRST_HUNDRED


@pytest.mark.parametrize("count", [1, 999, 1000, 1001])
def test_a_smaller_set_is_the_beginning_of_a_larger_one(count):
    images, labels = drawn.draw(2500, 1, 0)
    fewer, their_labels = drawn.draw(count, 1, 0)
    assert (fewer == images[:count]).all()
    assert (their_labels == labels[:count]).all()


def test_drawings_are_grey_pictures_of_all_digits(samples):
    images, labels = samples[0].images, samples[0].labels
    assert (images.dtype, images.shape[1:]) == (torch.uint8, (28, 28))
    counts = torch.bincount(labels)
    assert len(counts) == 10
    assert counts.min() > 0.8 * counts.max()
    assert images.flatten(1).max(1).values.min() > 100
    assert len({bytes(image) for image in images[:1000].flatten(1).numpy()}) == 1000


def test_the_statistics_for_normalising_are_those_of_the_drawings(samples):
    pixels = samples[0].images.double() / 255
    assert float(pixels.mean()) == pytest.approx(IDX["drawn-digits"].mean, abs=0.001)
    assert float(pixels.std()) == pytest.approx(IDX["drawn-digits"].std, abs=0.001)


def test_torchvision_reads_what_was_written(tmp_path):
    written = drawn.make(30, 20, 1, tmp_path)
    assert len(written) == 4
    for number, (train, count) in enumerate(((True, 30), (False, 20))):
        read = torchvision.datasets.MNIST(tmp_path, train=train, download=False)
        images, labels = drawn.draw(count, 1, number)
        assert (read.data.numpy() == images).all()
        assert (read.targets.numpy() == labels).all()
        picture, label = read[0]
        assert (picture.size, label) == ((28, 28), labels[0])


def accuracy(model, test):
    with torch.no_grad():
        batch = test.batch(torch.arange(len(test)))
        return float((model(batch.images).argmax(1) == batch.labels).float().mean())


def fit(model, train, batch_size, epochs, lr):
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    steps = len(train) // batch_size * epochs
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=steps + 1)
    for _ in range(epochs):
        for indices in torch.randperm(len(train)).split(batch_size)[: len(train) // batch_size]:
            batch = train.batch(indices)
            optimizer.zero_grad()
            cross_entropy(model(batch.images), batch.labels).backward()
            optimizer.step()
            schedule.step()
    return model


def test_a_linear_classifier_does_better_than_chance_but_cannot_solve_it(samples):
    train, test = samples
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))
    told = accuracy(fit(model, train, batch_size=100, epochs=20, lr=3e-3), test)
    assert 0.3 < told < 0.95


def test_the_convolutional_network_solves_it():
    """At half the resolution and without dropout: the whole pictures take half a minute to the same accuracy."""
    train, test = split(30000, 0, halved=True), split(1000, 1, halved=True)
    model = ConvNet(side=14, classes=10).eval()
    assert accuracy(fit(model, train, batch_size=32, epochs=1, lr=3e-3), test) >= 0.99
