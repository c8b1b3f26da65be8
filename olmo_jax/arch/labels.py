"""Labels of a batch."""

IGNORED = -100
"""The label of a position that no loss counts."""
