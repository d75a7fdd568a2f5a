"""Texts of remedies that several checks share."""

from __future__ import annotations


def nearest_divisors(sizes: tuple[int, ...]) -> str:
    """A hint such as `nearest divisors: 4 and 6`; empty where there are none."""
    if not sizes:
        return ""
    return f"nearest {'divisor' if len(sizes) == 1 else 'divisors'}: {' and '.join(map(str, sizes))}"
