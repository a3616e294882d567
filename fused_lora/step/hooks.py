"""Our hooks. A module that has them may still run fused."""


class Bystander:
    """One of our hooks: it does not keep its module from running fused."""
