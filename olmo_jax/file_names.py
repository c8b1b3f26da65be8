"""Names of files that more than one package writes or looks for."""

CONFIG = "config.yaml"
"""A run's config, in its folder and in a job's."""

TOKENIZER = "tokenizer.json"
"""A tokenizer as Hugging Face writes it: beside tokens, in a run folder, in an export."""

CHECKPOINTS = "checkpoints"
"""The folder of a run's checkpoints, in its own."""

PATTERN_SIGNS = ("*", "?", "[", "\\")
"""What no path of a run may have: Orbax takes it for a pattern of several paths."""
