"""Axes, device order, the two views of the ranks, and the rules that divide parameters."""
