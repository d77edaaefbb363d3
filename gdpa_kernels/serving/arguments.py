"""Checks of arguments that name users, one entry a user, and former names of arguments.

Called by cache.py alone, but for `renamed`. Each check returns what it checked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping

import torch


def renamed(old: str, new: str) -> Callable[[Callable], Callable]:
    """A decorator for a function whose argument `new` was called `old`: the former keyword is taken
    in its place until version 0.3."""

    def decorate(function: Callable) -> Callable:
        @functools.wraps(function)
        def call(*args, **kwargs):
            if old in kwargs and new not in kwargs:
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate


def check_list(name: str, values: object, count: int | None = None) -> list:
    """`values` as a list. Raises TypeError unless they are a sequence, of which a string, a set and
    a dict are none, and ValueError unless they are `count`, if that is given."""
    try:
        # Entries of other arguments follow the order, which a set has not, nor a dict by meaning.
        if isinstance(values, str | bytes | set | frozenset | Mapping):
            raise TypeError
        entries = list(values)
    except TypeError:
        got = f"the string {values!r}" if isinstance(values, str | bytes) else repr(values)
        raise TypeError(f"{name} must be a sequence, one entry a user, got {got}") from None
    if count is not None and len(entries) != count:
        raise ValueError(f"{name} must have one entry a user, {count}, got {len(entries)}")
    return entries


def check_key(name: str, value: Hashable) -> Hashable:
    """`value`. Raises TypeError unless it can be the key of a dict: a tensor cannot, since equal
    ones are not one key, nor what has no hash."""
    if isinstance(value, torch.Tensor):
        raise TypeError(
            f"{name} must be a number or a name, not a tensor (use tolist), got {value!r}"
        )
    try:
        hash(value)
    except TypeError:
        raise TypeError(f"{name} must be hashable, got {value!r}") from None
    return value


def check_users(users: object, epochs: object) -> tuple[list[Hashable], list[Hashable]]:
    """Both as lists, epochs of 0 for None. Raises TypeError or ValueError unless they are sequences
    of keys, as many of each, and the users distinct."""
    keys = [check_key("each of users", user) for user in check_list("users", users)]
    if len(set(keys)) != len(keys):
        raise ValueError(f"users must be distinct, got {keys}")
    if epochs is None:
        return keys, [0] * len(keys)
    epochs = check_list("epochs", epochs, len(keys))
    return keys, [check_key("each of epochs", epoch) for epoch in epochs]
