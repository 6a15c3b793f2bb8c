"""The table, for a terminal and for docs/performance.md."""

import pathlib

DOCUMENT = pathlib.Path(__file__).resolve().parents[3] / "docs" / "performance.md"
BEGIN = "<!-- table: written by tests/bench/{} --markdown -->"
END = "<!-- end of table -->"
WORDS = {True: "yes", False: "NO", None: "-"}
HEADINGS = ("what", "resvisor", "alternatives", "ratio", "goal", "met")


def number(value, unit=""):
    if value is None:
        return "-"
    size = abs(value)
    if isinstance(value, int) or size >= 1000 or value == int(value):
        text = f"{value:,.0f}"
    else:
        text = f"{value:.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.2f}"
    return f"{text} {unit}".strip()


def cells(row):
    others = ", ".join(f"{name} {number(value)}" for name, value in row.alternatives)
    ratio = "-" if row.ratio is None else f"{row.ratio:.{2 if row.ratio >= 0.1 else 3}f}"
    return (row.what, number(row.ours, row.unit), others or "-", ratio, row.goal or "-", WORDS[row.met])


def text(facts, rows):
    lines = [f"{name + ':':<11} {value}" for name, value in facts.items()] + [""]
    table = [HEADINGS, *map(cells, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEADINGS))]
    for i, line in enumerate(table):
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
        if i and rows[i - 1].note:
            lines.append(f"    {rows[i - 1].note}")
    wanted = [row for row in rows if row.met is not None]
    lines.append("")
    lines.append(f"{sum(row.met for row in wanted)} of {len(wanted)} goals met; ratio = resvisor / the first alternative")
    return "\n".join(lines)


def markdown(facts, rows):
    lines = [f"- {name}: {value}" for name, value in facts.items()]
    lines += ["", "| " + " | ".join((*HEADINGS, "notes")) + " |", "|" + " --- |" * (len(HEADINGS) + 1)]
    for row in rows:
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in (*cells(row), row.note)) + " |")
    return "\n".join(lines)


def write_markdown(program, facts, rows):
    page, begin = DOCUMENT.read_text(), BEGIN.format(program)
    before, rest = page.split(begin, 1)
    after = rest.split(END, 1)[1]
    DOCUMENT.write_text(f"{before}{begin}\n{markdown(facts, rows)}\n{END}{after}")
