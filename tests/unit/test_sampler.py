"""sampler.py: the order of rows is a function of (seed, epoch), whatever the number of ranks."""

import torch

from conftest import each_of
from input_pipeline.sampler import BATCHES_PER_SORT, Sampler, batch_sizes, stratified_rows

LENGTHS = torch.arange(1003) % 97 + 1
WITH_AND_WITHOUT = each_of("lengths", [None, LENGTHS])


def full_batches(sampler: Sampler, epoch: int, batch_size: int) -> torch.Tensor:
    return torch.stack(sampler.epoch(epoch, [batch_size] * (len(sampler) // batch_size)))


@WITH_AND_WITHOUT
def test_order_is_a_function_of_seed_and_epoch(lengths):
    first = full_batches(Sampler(1003, 3, lengths=lengths), 5, 32)
    again = Sampler(1003, 3, lengths=lengths)
    full_batches(again, 0, 7)  # neither earlier draws nor the global random state matter
    torch.manual_seed(99)
    before = torch.get_rng_state()
    assert torch.equal(first, full_batches(again, 5, 32))
    assert torch.equal(before, torch.get_rng_state())
    assert not torch.equal(first, full_batches(Sampler(1003, 3, lengths=lengths), 6, 32))
    assert not torch.equal(first, full_batches(Sampler(1003, 4, lengths=lengths), 5, 32))


def test_batches_of_an_epoch_hold_every_row_and_none_is_below_half_the_size():
    for rows in (8, 9, 60, 100, 101, 129, 1000, 5000):
        for batch_size in (n for n in (1, 2, 3, 4, 7, 8, 60, 100, 128, 999) if n <= rows):
            sizes = batch_sizes(rows, batch_size)
            assert sum(sizes) == rows
            assert batch_size / 2 <= min(sizes) <= max(sizes) <= batch_size
            assert sizes == sorted(sizes, reverse=True)
            assert sum(size < batch_size for size in sizes) <= 2
    # Four ranks of two rows: any smaller batch would leave a rank with one row.
    assert batch_sizes(17, 8, smallest=8) == [8, 9]
    assert batch_sizes(15, 8, smallest=8) == [15]


def test_the_small_batches_do_not_always_get_the_longest_rows():
    for count, size in ((1003, 60), (899, 7)):  # in the latter the last sorted group has one alone
        sizes, sampler = batch_sizes(count, size), Sampler(count, 3, lengths=LENGTHS[:count])
        batches = [rows for epoch in range(20) for rows in sampler.epoch(epoch, sizes)]
        small = [rows for rows in batches if len(rows) == min(sizes)]
        means = sorted(LENGTHS[rows].double().mean().item() for rows in small)
        assert means[0] < 30 < means[len(means) // 2] < 90


@WITH_AND_WITHOUT
def test_balanced_epochs_draw_each_class_equally_often(lengths):
    """The rows of an epoch are the same for every size of a batch, so for every number of ranks."""
    labels = torch.tensor([4] * 900 + [1] * 100 + [2] * 3)[torch.arange(1003) * 7 % 1003]
    sampler = Sampler(1003, 3, lengths=lengths, labels=labels)
    drawn = torch.cat(sampler.epoch(2, batch_sizes(1003, 32))).sort().values
    for size in (100, 1003):
        again = Sampler(1003, 3, lengths=lengths, labels=labels)
        assert torch.equal(torch.cat(again.epoch(2, batch_sizes(1003, size))).sort().values, drawn)
    assert not torch.equal(torch.cat(sampler.epoch(3, [1003])).sort().values, drawn)
    assert sorted(labels[drawn].bincount().tolist()) == [0, 0, 334, 334, 335]
    times = drawn.bincount(minlength=1003)
    for label, often in ((4, {0, 1}), (1, {3, 4}), (2, {111, 112})):
        assert set(times[labels == label].tolist()) == often
    halves = labels[sampler.epoch(2, [1003])[0]].split(502)
    assert all((half == 1).sum() > 100 for half in halves), "in random order"
    in_batches = [rows.bincount().max() for rows in sampler.epoch(2, batch_sizes(1003, 64))]
    assert max(in_batches) < 16, "copies of a row do not come together"


def padding(batches: torch.Tensor, lengths: torch.Tensor) -> float:
    """Return the fraction of padding tokens; each batch is as long as its longest row."""
    drawn = lengths[batches]
    return 1 - drawn.sum().item() / (drawn.max(1).values.sum().item() * batches.shape[1])


def test_lengths_keep_padding_below_a_tenth():
    lengths = torch.randint(8, 129, (20_000,), generator=torch.Generator().manual_seed(1))
    shuffled, grouped = (
        full_batches(Sampler(20_000, 0, lengths=known), 0, 32) for known in (None, lengths)
    )
    assert padding(shuffled, lengths) > 0.4
    for rank in range(4):
        assert padding(grouped[:, rank::4], lengths) < 0.1


def test_batches_of_similar_length_come_in_random_order():
    rows = 3 * BATCHES_PER_SORT * 32
    lengths = torch.randint(8, 129, (rows,), generator=torch.Generator().manual_seed(2))
    first, second = (full_batches(Sampler(rows, 0, lengths=lengths), epoch, 32) for epoch in (0, 1))
    means = lengths[first].double().mean(1)
    for other in (means.roll(1), torch.arange(len(means)).double()):  # the batch before; the step
        assert abs(torch.corrcoef(torch.stack([means, other]))[0, 1]) < 0.25
    members = ({frozenset(batch.tolist()) for batch in batches} for batches in (first, second))
    assert set.isdisjoint(*members)


@each_of("fraction", [0.001, 0.1, 0.25, 0.5, 1.0])
def test_stratified_rows_of_a_seed_are_the_same_fraction_of_each_class(fraction):
    counts = (400, 200, 8)
    labels = torch.tensor([label for label, count in enumerate(counts) for _ in range(count)])
    labels = labels[torch.randperm(608, generator=torch.Generator().manual_seed(0))]
    drawn, others = stratified_rows(labels, fraction, seed=7)
    assert torch.equal(drawn, stratified_rows(labels, fraction, seed=7)[0])
    assert fraction == 1 or not torch.equal(drawn, stratified_rows(labels, fraction, seed=8)[0])
    expected = [max(1, round(fraction * count)) for count in counts]
    assert labels[drawn].bincount(minlength=3).tolist() == expected
    assert torch.equal(torch.cat([drawn, others]).sort().values, torch.arange(608))
    for rows in (drawn, others):
        assert torch.equal(rows, rows.sort().values)
