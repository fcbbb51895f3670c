"""A report's tables for LaTeX."""

from collections.abc import Sequence

from momentkv.evals.report.layout import Matrix, Table, all_tables, entry_of, grouped, headlines, matrices, short_name
from momentkv.evals.report.runs import View
from momentkv.evals.report.tables import HEADINGS, cells_of, title_of

_SPECIAL = {
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "\n": " ",
}
_COLUMNS = 8  # of a matrix beside the method: what a page holds


def tex(text: str) -> str:
    """Text as LaTeX sets it."""
    return "".join(_SPECIAL.get(c, c) for c in text)


def _number(text: str) -> str:
    """Figures with real minus signs."""
    return tex(text).replace("-", "$-$") if text not in ("-", "") and any(c.isdigit() for c in text) else tex(text)


def _float(columns: str, head: list[str], lines: list[str], caption: str) -> str:
    return "\n".join(
        [
            r"\begin{table}[p]",
            r"\centering\scriptsize\setlength{\tabcolsep}{3pt}",
            rf"\caption{{{caption}}}",
            rf"\begin{{tabular}}{{@{{}}{columns}@{{}}}}",
            r"\toprule",
            " & ".join(head) + r" \\",
            r"\midrule",
            *lines,
            r"\bottomrule",
            r"\end{tabular}",
            r"\end{table}",
        ]
    )


def _stacked(heading: str) -> str:
    """A heading of several lines. The empty group keeps a bracket from being read as the line break's argument."""
    lines = r" \\ {}".join(tex(line) for line in heading.split("\n"))
    return rf"\shortstack[r]{{{lines}}}" if "\n" in heading else lines


def _table(table: Table, caption: str) -> str:
    lines, group = [], None
    for o in table.objects:
        if group not in (None, entry_of(o).group):
            lines.append(r"\addlinespace")
        group = entry_of(o).group
        name, *cells = cells_of(table, o)
        shown = [tex(name), *map(_number, cells[:-2]), tex(cells[-2]), _number(cells[-1])]
        if table.is_best(o):
            shown[0], shown[7] = (rf"\textbf{{{shown[i]}}}" for i in (0, 7))
        lines.append(" & ".join(shown) + r" \\")
    head = [*HEADINGS, f"{table.metric} {table.arrow}\n[95 %]", "difference\n[95 %]", "to the strongest plain", "n"]
    return _float(
        "l" + "r" * 8 + "lr",
        [_stacked(h) for h in head],
        lines,
        f"{tex(f'{title_of(table)}, budget {table.level}')}. {caption}",
    )


def _matrix(matrix: Matrix, start: int, caption: str) -> str:
    part = slice(start, start + _COLUMNS)
    lines = []
    for o, cells in matrix.lines:
        shown = [tex(short_name(o))]
        for table, cell in cells[part]:
            text = _number(table.show(cell["value"])) if cell else "-"
            shown.append(rf"\textbf{{{text}}}" if cell and table.is_best(cell) else text)
        lines.append(" & ".join(shown) + r" \\")
    head = [
        _stacked(label.replace("_", "_\n")) for label, t in zip(matrix.labels[part], matrix.tables[part], strict=True)
    ]
    first = matrix.tables[0]
    return _float(
        "l" + "r" * len(head),
        ["method", *head],
        lines,
        f"{tex(f'{first.family}, {matrix.title}, budget {first.level}')}. {caption}",
    )


def _remarks(view: View) -> str:
    items = [rf"\item {tex(remark)}" for remark in view.remarks]
    return "\n".join([r"\begin{itemize}", *items, r"\end{itemize}"]) if items else "% complete, no errors"


def latex_text(views: Sequence[View]) -> str:
    """What is missing, the tables of averages and of every task, for a document that loads `booktabs`."""
    parts = [r"% needs \usepackage{booktabs}"]
    for view in views:
        parts += [rf"\paragraph{{{tex(view.title)}}}", _remarks(view)]
        for (family, _), tables in grouped(all_tables(view)).items():
            own = [remark for remark in view.remarks if remark.startswith(f"{family}/")]
            caption = " ".join(tex(f"{sentence}.") for sentence in (view.title, *own))
            parts += [_table(table, caption) for table in headlines(tables)]
            for matrix in matrices(tables):
                parts += [_matrix(matrix, i, caption) for i in range(0, len(matrix.tables), _COLUMNS)]
            parts.append(r"\clearpage")  # LaTeX can hold only so many floats
    return "\n\n".join(parts) + "\n"
