"""Markdown tables as a reader sees them: a row's cells by the heading above them."""


def rows_in(markdown):
    """Every row of every table, in order; of headings that stand twice, the last."""
    found = []
    for block in markdown.split("\n\n"):
        lines = [line.strip("|").split("|") for line in block.split("\n") if line.startswith("| ")]
        if len(lines) > 1:
            header, ruled, *rest = ([cell.strip() for cell in line] for line in lines)
            assert set(ruled) == {"---"} and {len(line) for line in rest} <= {len(header)}
            found += [dict(zip(header, line, strict=True)) for line in rest]
    return found


def row_of(markdown, *cells):
    """The first row that has all of these."""
    return next(row for row in rows_in(markdown) if set(cells) <= set(row.values()))
