"""Which source gives the next sequence, in exact proportion and by random access."""

import sys
from collections.abc import Sequence
from fractions import Fraction
from math import gcd, lcm

import grain


def whole_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Turn weights into whole numbers in the same proportion: 0.7 and 0.3 give 7 and 3."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    return tuple(share // gcd(*scaled) for share in scaled)


def choose(number: int, shares: Sequence[int]) -> tuple[int, int]:
    """Return the source of sequence `number`, and how many it gave before.

    Each source in turn takes its share of what the ones before it left, rounded up, so every
    sum(shares) sequences hold exactly shares[i] of source i and prefixes stay close to that.
    Source: grain 0.2.18, dataset/transformations/mix.py.
    Differs: shares are exact; Grain's own weights are rounded to 1/100 of the smallest.
    """
    # Of n sequences the sources behind this one get their share, rounded down. Shares 2 and 1:
    #
    #     number                      0  1  2 | 3  4  5
    #     left for source 1, before   0  0  0   1  1  1     number * 1 // 3
    #     left for source 1, after    0  0  1   1  1  2     (number + 1) * 1 // 3
    #     source                      0  0  1   0  0  1     1 where what is left grows
    #
    # What is left is divided in the same way by the next source: integers alone, and no state.
    before, after, rest = number, number + 1, sum(shares)
    for source, share in enumerate(shares):
        rest -= share
        left_before, left_after = before * rest // (rest + share), after * rest // (rest + share)
        if after - left_after > before - left_before:
            return source, before - left_before
        before, after = left_before, left_after
    raise AssertionError(f"no source for sequence {number} of shares {shares}")


class Proportions(grain.transforms.DatasetSelectionMap):
    """`choose` as Grain wants it."""

    def __init__(self, weights: Sequence[float]):
        self.shares = whole_shares(weights)

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, index: int) -> tuple[int, int]:
        return choose(index, self.shares)
