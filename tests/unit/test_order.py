"""Which samples make up a step, and what randomness it sees: functions of seed and step alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer.order import Order, mix, seed_step

CPU = torch.device("cpu")

SIZES = st.tuples(st.integers(1, 500), st.integers(1, 60)).filter(lambda sizes: sizes[0] >= sizes[1])


def epoch(order, number):
    """All global batches of an epoch, one after the other."""
    first = number * order.steps_per_epoch
    return torch.cat([order.global_batch(first + step) for step in range(order.steps_per_epoch)])


@given(SIZES, st.integers(0, 3), st.integers(0, 2**40))
def test_an_epoch_shows_each_sample_at_most_once(sizes, number, seed):
    samples, batch_size = sizes
    shown = epoch(Order(samples, batch_size, seed), number)
    assert len(shown) == samples // batch_size * batch_size > samples - batch_size
    assert len(set(shown.tolist())) == len(shown)
    assert shown.min() >= 0
    assert shown.max() < samples


def test_an_epoch_shows_every_sample_if_the_batches_come_out_even():
    assert sorted(epoch(Order(120, 30, 1), 2).tolist()) == list(range(120))


def test_what_one_epoch_leaves_out_another_shows():
    order = Order(100, 64, 1)
    assert {int(index) for number in range(20) for index in epoch(order, number)} == set(range(100))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 6, 12])
def test_the_shares_of_all_ranks_make_up_the_global_batch_whatever_their_number(world_size):
    order = Order(1000, 12, 7)
    for step in (0, 1, 82, 83, 500):
        shares = [Order(1000, 12, 7).share(step, rank, world_size) for rank in range(world_size)]
        assert {len(share) for share in shares} == {12 // world_size}
        assert torch.equal(torch.cat(shares), order.global_batch(step))


def test_other_epochs_and_other_seeds_show_other_orders():
    order = Order(1000, 100, 1)
    shown = [tuple(epoch(order, number).tolist()) for number in range(5)]
    shown += [tuple(epoch(Order(1000, 100, seed), 0).tolist()) for seed in (2, 3)]
    assert len(set(shown)) == len(shown)


def test_a_step_shows_the_same_samples_however_one_got_there():
    straight = Order(1000, 64, 5)
    batches = [straight.global_batch(step) for step in range(40)]
    jumping = Order(1000, 64, 5)
    for step in (39, 0, 20, 14, 15, 16, 39):
        assert torch.equal(jumping.global_batch(step), batches[step])


def test_the_order_neither_uses_nor_changes_the_global_generator():
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = Order(100, 10, 1).global_batch(0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert torch.equal(Order(100, 10, 1).global_batch(0), first)


def test_the_order_of_a_seed_never_changes():
    assert Order(1438, 64, 1).global_batch(0)[:8].tolist() == FIRST
    assert (mix(1, 2), mix(2, 1), mix(0)) == MIXED


FIRST = [1365, 214, 1402, 62, 653, 754, 558, 724]
MIXED = (6804074658870690613, 8085905411993364802, 8147104208329303767)


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=4))
def test_a_mixed_seed_fits_every_generator(numbers):
    assert 0 <= mix(*numbers) < 2**63
    assert mix(*numbers) == mix(*numbers)


def test_mixed_seeds_of_neighbours_have_nothing_in_common():
    seeds = {mix(seed, step, rank) for seed in range(10) for step in range(10) for rank in range(10)}
    assert len(seeds) == 1000
    assert mix(1, 2) != mix(2, 1)


def test_the_randomness_of_a_step_depends_on_seed_step_and_rank_alone():
    def drawn(*place):
        seed_step(*place, CPU)
        return tuple(torch.rand(4).tolist())

    torch.rand(17)
    first = drawn(1, 10, 0)
    torch.rand(17)
    assert drawn(1, 10, 0) == first
    assert len({first, drawn(2, 10, 0), drawn(1, 11, 0), drawn(1, 10, 1)}) == 4
