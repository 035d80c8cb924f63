"""A page of HTML that needs nothing but itself: tables, facts, sections, and the style of all.

page("digits", [Section("Flags", table(["flag", "value"], [["--lr", "0.1"]]))])

What is put into a table or a heading is escaped. The page forbids itself, by a content security
policy, to load anything. It follows the reader's choice of light or dark, and is light on paper.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

MISSING = "–"  # a value that is not known

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
# The colours of lines are those of figures.pictures, lighter on a dark page.
LIGHT = """
  --page: #fff; --text: #1b1f24; --quiet: #59636e; --rule: #d5dae0; --panel: #f4f6f8;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #cc79a7; --c4: #e69f00; --c5: #56b4e9;
  --c6: #000; --heat: 0, 114, 178; --strong: #fff;"""
DARK = """
  --page: #14171b; --text: #e6e9ed; --quiet: #a3adb8; --rule: #39424c; --panel: #1e2329;
  --c0: #4fa8e0; --c1: #f28b4b; --c2: #35c79c; --c3: #e3a3c7; --c4: #f0bd4c; --c5: #8fd0f5;
  --c6: #fff; --heat: 60, 150, 215; --strong: #fff;"""
STYLE = f"""
:root {{ color-scheme: light dark;{LIGHT} }}
@media screen and (prefers-color-scheme: dark) {{ :root {{{DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 70rem; padding: 1.2rem 1rem 3rem; background: var(--page);
  color: var(--text); font: 16px/1.5 system-ui, sans-serif; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: 0 0 .3rem; overflow-wrap: anywhere; }}
h2 {{ font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-bottom: .2rem;
  border-bottom: 1px solid var(--rule); }}
h3 {{ font-size: 1rem; margin: 1.4rem 0 .4rem; overflow-wrap: anywhere; }}
p {{ margin: .4rem 0; overflow-wrap: anywhere; }}
.quiet, .facts dt {{ color: var(--quiet); }}
.facts {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(10rem, 1fr)); gap: .6rem;
  margin: 1rem 0; }}
.facts div {{ background: var(--panel); border-radius: .4rem; padding: .5rem .8rem; }}
.facts dt {{ font-size: .85rem; }}
.facts dd {{ margin: 0; font-weight: 600; font-variant-numeric: tabular-nums; }}
.facts small {{ display: block; font-weight: 400; color: var(--quiet); }}
.charts {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 24rem), 1fr));
  gap: .8rem 1.2rem; }}
.charts svg {{ width: 100%; height: auto; max-width: 36rem; }}
figure {{ margin: 0; break-inside: avoid; }}
figure img {{ max-width: 100%; height: auto; background: #fff; border-radius: .3rem; }}
svg text {{ fill: var(--quiet); font: 14px system-ui, sans-serif; }}
.grid {{ stroke: var(--rule); stroke-width: .7; fill: none; }}
.axis {{ stroke: var(--quiet); fill: none; }}
.line {{ stroke: var(--c); stroke-width: 2; fill: none; stroke-linejoin: round; }}
.mark {{ fill: var(--c); }}
.c0 {{ --c: var(--c0); }} .c1 {{ --c: var(--c1); }} .c2 {{ --c: var(--c2); }}
.c3 {{ --c: var(--c3); }} .c4 {{ --c: var(--c4); }} .c5 {{ --c: var(--c5); }}
.c6 {{ --c: var(--c6); }}
.legend {{ display: flex; flex-wrap: wrap; gap: .2rem 1.2rem; margin: .3rem 0 .6rem; padding: 0;
  list-style: none; overflow-wrap: anywhere; }}
.key {{ width: 28px; height: 10px; margin-right: .4rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .25rem .7rem .25rem 0; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--rule); }}
td {{ overflow-wrap: anywhere; min-width: 3.5rem; }}
th {{ font-weight: 600; }}
.numbers td {{ text-align: right; white-space: nowrap; }}
.numbers thead th:not(:first-child) {{ text-align: right; }}
.confusion td {{ text-align: center; padding: .25rem .4rem; min-width: 2.6rem;
  background: rgba(var(--heat), var(--share)); border: 1px solid var(--page); }}
.confusion td.much {{ color: var(--strong); }}
.confusion thead th {{ writing-mode: vertical-rl; transform: rotate(180deg); text-align: left;
  padding: .3rem; border: 0; }}
.confusion tbody th {{ border: 0; font-weight: 400; text-align: right;
  max-width: min(14rem, 32vw); }}
.confusion thead th, .confusion tbody th {{ max-height: 14rem; overflow: hidden;
  text-overflow: ellipsis; white-space: nowrap; }}
summary {{ cursor: pointer; color: var(--quiet); }}
@media print {{
  body {{ max-width: none; padding: 0; font-size: 11pt; }}
  .wide {{ overflow: visible; }}
  * {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
  h2, h3 {{ break-after: avoid; }}
  tr {{ break-inside: avoid; }}
}}
"""


@dataclass(frozen=True)
class Section:
    """A heading, and the HTML below it; a section without any is left out."""

    title: str
    body: str


def page(title: str, sections: Sequence[Section], *, head: str = "") -> str:
    """A whole page.

    Args:
        title: of the window and the first heading.
        sections: what follows, in order.
        head: HTML below the first heading.
    """
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en">',
        "<head>",
        '<meta charset="utf-8">',
        f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',
        f"<title>{escape(title)}</title>",
        f"<style>{STYLE}</style>",
        "</head>",
        "<body>",
        f"<h1>{escape(title)}</h1>",
        head,
    ]
    for section in sections:
        if section.body:
            parts += ["<section>", f"<h2>{escape(section.title)}</h2>", section.body, "</section>"]
    return "\n".join([*parts, "</body>", "</html>", ""])


def heading_of(text: str) -> str:
    """A heading within a section."""
    return f"<h3>{escape(text)}</h3>"


def paragraph(text: str) -> str:
    """A paragraph in a quiet colour."""
    return f'<p class="quiet">{escape(text)}</p>'


def facts(values: Mapping[str, tuple[str, str]]) -> str:
    """Names with a value each, and a remark on it which may be ''."""
    items = []
    for name, (value, remark) in values.items():
        small = f"<small>{escape(remark)}</small>" if remark else ""
        items.append(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}{small}</dd></div>")
    return f'<dl class="facts">{"".join(items)}</dl>'


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = False) -> str:
    """A table whose first column has the names of the rows; '' without rows.

    Args:
        titles: of the columns.
        rows: the texts of each row.
        numbers: the other columns hold numbers.
    """
    if not rows:
        return ""
    head = "".join(f'<th scope="col">{escape(title)}</th>' for title in titles)
    lines = [f"<thead><tr>{head}</tr></thead>", "<tbody>"]
    for name, *cells in rows:
        columns = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        lines.append(f'<tr><th scope="row">{escape(name)}</th>{columns}</tr>')
    kind = ' class="numbers"' if numbers else ""
    return "\n".join([f'<div class="wide"><table{kind}>', *lines, "</tbody></table></div>"])


def heat_table(names: Sequence[str], counts: Sequence[Sequence[int]]) -> str:
    """A square table of counts, each coloured by its share of its row.

    Args:
        names: of the rows and of the columns.
        counts: whole numbers from 0 on.
    """
    head = "".join(f'<th scope="col" title="{escape(name)}">{escape(name)}</th>' for name in names)
    lines = [f"<thead><tr><td></td>{head}</tr></thead>", "<tbody>"]
    for name, row in zip(names, counts):
        total = sum(row) or 1
        cells = "".join(
            f"<td{' class=much' if count / total > 0.5 else ''} "
            f'style="--share:{count / total:.3f}">{count or ""}</td>'
            for count in row
        )
        title = escape(name)
        lines.append(f'<tr><th scope="row" title="{title}">{title}</th>{cells}</tr>')
    return "\n".join(
        ['<div class="wide"><table class="confusion">', *lines, "</tbody></table></div>"]
    )


def details(summary: str, body: str) -> str:
    """A part of the page that is opened by a click."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def charts(figures: Sequence[str]) -> str:
    """Charts side by side, as many as fit; '' where none has anything to show."""
    shown = [f"<figure>{figure}</figure>" for figure in figures if figure]
    return "\n".join(['<div class="charts">', *shown, "</div>"]) if shown else ""


def png_image(content: bytes, alt: str) -> str:
    """A picture within the page."""
    data = base64.b64encode(content).decode()
    return f'<figure><img alt="{escape(alt)}" src="data:image/png;base64,{data}"></figure>'
