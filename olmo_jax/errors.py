"""The error that a user causes and can mend; the command line prints it without a traceback."""


class UserError(Exception):
    """What was given, the rule with its numbers, and what to write instead, in one message."""
