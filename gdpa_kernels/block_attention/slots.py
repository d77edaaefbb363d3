"""What the rungs with roles ask of their launch constants, before a kernel waits for ever."""

from typing import Protocol


class Slots(Protocol):
    """Launch constants with math roles, slots of all of them, and heads whose loads are issued
    together."""

    math_roles: int
    num_stages: int
    heads_together: int


def check_slots(config: Slots) -> None:
    """Raise ValueError where loads that are issued together would wait for each other.

    A role gives a slot back when the next one has arrived.
    """
    own = config.num_stages // config.math_roles
    if own <= config.heads_together > 1:
        raise ValueError(
            f"a math role must have more slots than heads_together, {config.heads_together}, got "
            f"{own}: num_stages {config.num_stages}, math_roles {config.math_roles}"
        )


def heads_together(config: Slots, num_heads: int) -> int:
    """config.heads_together; ValueError unless it divides the number of query heads."""
    if num_heads % config.heads_together:
        raise ValueError(
            f"heads_together must divide the number of query heads, {num_heads}, got "
            f"{config.heads_together}"
        )
    return config.heads_together
