"""Sections of Markdown pages that a program writes between two markers."""

from __future__ import annotations


def replace_generated_section(page: str, begin: str, end: str, content: str) -> str:
    """Return the page with `content` between the two markers, which stay.

    Raises:
        ValueError: the page does not have each marker exactly once, in this order.
    """
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"expected exactly one '{begin}' and after it one '{end}'")
    return f"{page.split(begin)[0]}{begin}\n{content}\n{end}{page.split(end)[1]}"
