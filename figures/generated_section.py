"""Sections of Markdown pages that a program writes between two markers.

page = replace_generated_section(page, "<!-- begin -->", "<!-- end -->", content=table)
"""

from __future__ import annotations


def replace_generated_section(page: str, begin: str, end: str, content: str) -> str:
    """Return the page with `content` between the two markers, which stay.

    Args:
        page: text of the whole page.
        begin: the marker before the section.
        end: the marker after it.
        content: the new section, without a newline at its ends.

    Raises:
        ValueError: the page does not have each marker exactly once, in this order.
    """
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(end) < page.index(begin):
        raise ValueError(f"expected exactly one '{begin}' and after it one '{end}'")
    before, after = page.split(begin)[0], page.split(end)[1]
    return f"{before}{begin}\n{content}\n{end}{after}"
