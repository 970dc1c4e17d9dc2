"""What can go wrong with a whole table, as sentences."""


class ReproduceError(ValueError):
    """A table that cannot be run or was not run to its end, and what to do."""


class Interrupted(ReproduceError):  # noqa: N818
    """A command that was asked to stop, with everything saved."""
