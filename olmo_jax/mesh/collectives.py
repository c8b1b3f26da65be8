"""What a collective sends, by a ring: the one formula for plans and for counts of programs."""


def ring_bytes(kind: str, operand_bytes: int, ranks: int) -> float:
    """Return what one rank sends, by a ring over n ranks, if it puts in S = `operand_bytes`.

    Units: bytes. all_gather S (n-1), its operand being the shard; reduce_scatter and all_to_all
    S (n-1)/n (for a ragged one a bound); reduce, max and min 2 S (n-1)/n; permute and broadcast S.
    """
    if kind in ("permute", "broadcast"):
        return float(operand_bytes)
    if kind == "all_gather":
        return float(operand_bytes * (ranks - 1))
    # A reduction is a reduce-scatter, then an all-gather of the sums.
    times = 1 if kind in ("reduce_scatter", "all_to_all", "ragged_all_to_all") else 2
    return times * operand_bytes * (ranks - 1) / ranks
