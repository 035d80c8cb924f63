"""The order of the rows: which rows go into which global batch, computed alike on every rank.

    sampler = Sampler(rows=50_000, seed=0)
    sizes = batch_sizes(50_000, 512)                           # 96 of 512, then two of 424
    for batch in sampler.epoch(3, sizes):                      # global batches, equal on all ranks
        local_rows = batch[row_owners([128] * 4) == 1]         # the rows that rank 1 computes

The order is a function of (seed, epoch) alone. There is no random state to save, a run can resume
at any step of any epoch without communication, and W ranks of b rows draw the same global batch as
one rank of W x b rows.
"""

import warnings
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction

import torch
from torch import Tensor

MOST_FOLDS = 100  # from which a share of groups is drawn
BATCHES_PER_SORT = 128  # batches whose rows are sorted by length together, see `Sampler`


@dataclass(eq=False)
class Sampler:
    """Shuffles the rows of a training set into global batches.

    With `lengths`, the shuffled rows are cut into groups of 128 batches, the rows of each group are
    sorted by length, and the resulting batches are shuffled: batches hold rows of similar length,
    which need little padding, while their order stays random.
    """

    rows: int  # number of samples in the training set
    seed: int  # of the order; the epoch number is mixed in
    _: KW_ONLY
    lengths: Tensor | None = None  # (rows,) tokens of each sample; None where all are equally long
    # (rows,) class numbers, to draw each class equally often (see `balanced_order`); None where
    # each row comes once.
    labels: Tensor | None = None
    held_out: Tensor | None = None  # (n,) rows that come in no epoch before `until`; None is none
    until: int = 0  # number of an epoch

    def __len__(self) -> int:
        return self.rows

    def rows_of(self, epoch: int) -> int:
        held_out = self._held_out_in(epoch)
        return self.rows - (0 if held_out is None else len(held_out))

    def _held_out_in(self, epoch: int) -> Tensor | None:
        return self.held_out if epoch < self.until else None

    def epoch(self, epoch: int, sizes: Sequence[int]) -> list[Tensor]:
        """Draw the batches of one epoch, in which no row occurs twice unless classes are balanced.

        Args:
            sizes: rows of each global batch, as `batch_sizes` returns them: the full ones first.
                Where rows are sorted by length, they come in another order.
        Returns:
            Row numbers of each batch, (size,) int64.
        """
        generator = epoch_generator(self.seed, epoch)
        order = torch.randperm(self.rows, generator=generator)
        if (held_out := self._held_out_in(epoch)) is not None:
            order = order[~torch.isin(order, held_out)]
        if self.labels is not None:
            order = balanced_order(order, self.labels, generator)
        order = order[: sum(sizes)]
        # Sorted by length, the copies of a rare row would lie in the same batch.
        if self.lengths is None or self.labels is not None:
            return list(order.split(list(sizes)))
        group = torch.arange(len(order)) // (BATCHES_PER_SORT * sizes[0])
        sort_key = group * (int(self.lengths.max()) + 1) + self.lengths[order]
        sizes = _shuffle_last_group(sizes, generator)
        batches = order[torch.argsort(sort_key, stable=True)].split(sizes)
        return [batches[number] for number in torch.randperm(len(batches), generator=generator)]


def balanced_order(order: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw as many rows as there are, equally many of each class, in random order.

    Of a large class a part comes. Of a small one each row comes several times, as often as any
    other of its class or once more. Classes drawn at random have one row more than others where the
    number of rows is not divisible by that of the classes.

    Args:
        order: (rows,) row numbers in random order.
        labels: (all rows,) class number of each row.
        generator: of further random numbers.
    Returns:
        (rows,) int64 row numbers.
    """
    counts = labels[order].bincount()
    by_class = order[labels[order].argsort(stable=True)].split(counts[counts > 0].tolist())
    each, rest = divmod(len(order), len(by_class))
    sizes = each + (torch.randperm(len(by_class), generator=generator) < rest).long()
    drawn = [rows.repeat(-(-n // len(rows)))[:n] for rows, n in zip(by_class, sizes.tolist())]
    return torch.cat(drawn)[torch.randperm(len(order), generator=generator)]


def _shuffle_last_group(sizes: Sequence[int], generator: torch.Generator) -> list[int]:
    """Shuffle the sizes of the last groups of sorted batches, where the smaller ones are.

    Otherwise the smaller batches would always get the longest rows.
    """
    first = next((i for i, size in enumerate(sizes) if size < sizes[0]), len(sizes) - 1)
    start = first // BATCHES_PER_SORT * BATCHES_PER_SORT
    last_group = list(sizes[start:])
    if len(set(last_group)) > 1:
        order = torch.randperm(len(last_group), generator=generator)
        last_group = [last_group[number] for number in order]
    return [*sizes[:start], *last_group]


def batch_sizes(rows: int, batch_size: int, *, smallest: int = 1) -> list[int]:
    """Cut an epoch into batches: every row once, and no batch smaller than half of `batch_size`.

    The rows left over after the full batches make a batch of their own if they are enough for it.
    Otherwise they and the last full batch are split into two equal batches, so that no batch is
    larger than `batch_size` either. A small last batch would be a full step at the full learning
    rate on a noisy gradient and noisy BatchNorm statistics.

    Args:
        rows: number of samples in the training set, at least `batch_size`.
        batch_size: rows of a full global batch.
        smallest: no batch is smaller than this; where it is close to `batch_size`, the left-over
            rows may have to join the last full batch, which is then the larger one.
    Returns:
        The size of each batch; the full ones come first.
    """
    smallest = min(max(smallest, -(-batch_size // 2)), batch_size)
    full, rest = divmod(rows, batch_size)
    if rest == 0:
        return [batch_size] * full
    if rest >= smallest:
        return [batch_size] * full + [rest]
    last = batch_size + rest
    if last // 2 >= smallest:
        return [batch_size] * (full - 1) + [-(-last // 2), last // 2]
    return [batch_size] * (full - 1) + [last]


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """Return a CPU generator whose state depends on (seed, epoch) only."""
    return torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)


def row_owners(shares: Sequence[int]) -> Tensor:
    """Assign each row of a global batch to a rank, for ranks that take shares of unequal size.

    The rows of each rank are spread evenly over the batch, so that all get long and short ones.
    Equal shares give 0, 1, ..., 0, 1, ....

    Args:
        shares: number of rows of each rank; their sum is the global batch.
    Returns:
        (sum(shares),) int64, the rank of each position of the batch.
    """
    ranks = torch.repeat_interleave(torch.arange(len(shares)), torch.tensor(shares))
    positions = torch.cat(
        [(torch.arange(share, dtype=torch.float64) + 0.5) / max(share, 1) for share in shares]
    )
    return ranks[torch.argsort(positions, stable=True)]


def stratified_rows(labels: Tensor, fraction: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Draw the same fraction of the rows of each class (at least one), without replacement.

    Args:
        labels: (rows,) class numbers.
        fraction: the fraction to draw, in (0, 1].
    Returns:
        (drawn rows, all other rows), both sorted.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    is_drawn = torch.zeros(len(labels), dtype=torch.bool)
    for label in labels.unique():
        rows_of_class = order[labels[order] == label]
        count = max(1, round(fraction * len(rows_of_class)))
        is_drawn[rows_of_class[:count]] = True
    return is_drawn.nonzero().flatten(), (~is_drawn).nonzero().flatten()


def spread(rows: int, most: int) -> Tensor:
    """Row numbers, `most` of them at most, spread evenly."""
    return torch.linspace(0, rows - 1, min(rows, most), dtype=torch.float64).long()


def fold_of_rows(labels: Tensor, folds: int, *, seed: int, groups: Sequence[str] = ()) -> Tensor:
    """Deal the rows into folds, each of which has about the same share of each class.

    Args:
        labels: (rows,) class numbers.
        groups: of each row what it belongs to, which comes into one fold; () where rows do not.
    Returns:
        (rows,) int64, the fold of each row from 0 on.
    Raises:
        ValueError: a class has fewer rows than there are folds, or there are fewer groups.
    """
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold  # takes a second

    fewest, number = int(min(labels.unique(return_counts=True)[1])), len({*groups})
    if (not groups and folds > fewest) or (groups and folds > number):
        few = f"{number} groups" if groups else f"{fewest} rows of the smallest class"
        raise ValueError(f"there are {few}; give fewer folds")
    kind = StratifiedGroupKFold if groups else StratifiedKFold
    if groups and folds > int(labels.bincount().max()):
        labels = torch.zeros_like(labels)  # no class can be in every fold
    fold = torch.empty(len(labels), dtype=torch.int64)
    with warnings.catch_warnings():  # of classes with fewer rows than folds
        warnings.simplefilter("ignore")
        splits = kind(folds, shuffle=True, random_state=seed).split(labels, labels, groups or None)
        for number, (_, held_out) in enumerate(splits):
            fold[held_out] = number
    return fold


def held_out_rows(
    labels: Tensor, fraction: float, *, seed: int, groups: Sequence[str] = ()
) -> tuple[Tensor, Tensor]:
    """Draw validation rows as `stratified_rows` does, but none of a class that has one row only.

    Args:
        labels, fraction, seed: as of `stratified_rows`.
        groups: as of `fold_of_rows`; some of at most 100 folds are drawn, as close to the fraction
            as the number of groups allows.
    Returns:
        (validation rows, training rows), both sorted.
    Raises:
        ValueError: a class has no training rows, or there are no validation rows.
    """
    if groups:
        share = Fraction(fraction).limit_denominator(min(MOST_FOLDS, len({*groups})))
        if share in (0, 1):
            raise ValueError(f"{fraction:g} of {len({*groups})} groups is none or all of them")
        fold = fold_of_rows(labels, share.denominator, seed=seed, groups=groups)
        is_drawn = fold < share.numerator
    else:
        drawn, _ = stratified_rows(labels, fraction, seed=seed)
        is_drawn = torch.zeros(len(labels), dtype=torch.bool)
        is_drawn[drawn] = labels.bincount()[labels[drawn]] > 1
    return parted(labels, is_drawn, f"{fraction:g}", has_groups=bool(groups))


def parted(
    labels: Tensor, is_held_out: Tensor, share: str, *, has_groups: bool
) -> tuple[Tensor, Tensor]:
    """Return (validation rows, training rows), both sorted.

    Args:
        share: what a message begins with.
        has_groups: whether rows were held out by their groups, which may hold a whole class.
    Raises:
        ValueError: a class has no training rows, or there are no validation rows.
    """
    val, train = is_held_out.nonzero().flatten(), (~is_held_out).nonzero().flatten()
    classes = set(labels.tolist())
    if without := classes - set(labels[train].tolist()):
        advice = "give a smaller one"
        if has_groups:
            advice = "each class needs rows of several groups, or leave such a class out"
        raise ValueError(
            f"{share} leaves no training rows of {len(without)} of the {len(classes)} classes "
            f"({len(labels)} rows in all); {advice}"
        )
    if not len(val):
        raise ValueError(
            f"{share} leaves no validation rows, as each class has one row only; give more "
            "rows, or 0"
        )
    return val, train
