"""Reports of made-up runs: tables, the page, and where they go."""

import csv
import io
import re
from argparse import Namespace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from rich.console import Console

from momentkv.evals import report
from momentkv.evals.report.charts import RIGHT, Scale, chart_of, spread
from momentkv.evals.report.heatmaps import heat_maps
from momentkv.evals.report.html import html_text
from momentkv.evals.report.latex import latex_text, tex
from momentkv.evals.report.layout import all_tables, name_of, short_name
from momentkv.evals.report.runs import views_of
from momentkv.evals.report.tables import cells_of, csv_text, print_terminal
from momentkv.evals.results import ResultsError
from synthetic_run import SCHEMA, WHOSE, mixed_run, rows_of, scored, variant, write_run


def terminal(views, width: int = 120, every: bool = False) -> str:
    text = io.StringIO()
    print_terminal(views, Console(file=text, width=width), every)
    return text.getvalue()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return mixed_run(tmp_path_factory.mktemp("run"))


def test_order_and_best_of_a_table(run):
    (view,) = views_of([run], ["niah/grid"])
    table = next(t for t in all_tables(view) if t.level == "128")
    names = [name_of(o) for o in table.objects]
    assert names[:4] == ["full", "random", "streaming", "knorm"]
    assert names[-2:] == ["momentkv", "momentkv:paper"] and "bytes of" in names[-3]
    compressed = [o for o in table.objects if o["method"] != "full"]
    best = max(o["value"] for o in compressed)
    assert [o for o in table.objects if table.is_best(o)] == [o for o in compressed if o["value"] == best]
    assert "full" in names and not table.is_best(table.objects[0])


def test_where_all_tie_none_is_best(tmp_path):
    write_run(tmp_path, rows_of({"full": [1, 1], "adakv": [0, 0], "momentkv": [0, 0]}))
    (table,) = all_tables(views_of([tmp_path], ["ruler/vt"])[0])
    assert not any(map(table.is_best, table.objects))


def test_arrows_and_the_best_of_a_distance(run):
    (view,) = views_of([run], ["fidelity/avg"])
    tables = {t.metric: t for t in all_tables(view) if t.level == "128"}
    assert (tables["kl"].arrow, tables["top1"].arrow, tables["worse_share"].arrow) == ("↓", "↑", "↓")
    kl = tables["kl"]
    assert kl.best == min(o["value"] for o in kl.objects if o["method"] != "full")
    assert all(o["corrected"] for o in tables["worse_share"].objects if tables["worse_share"].is_best(o))


def test_cells_by_hand(tmp_path):
    rows = rows_of({"full": [1, 1], "adakv": [0, 1], "momentkv": [1, 1]})
    write_run(tmp_path, rows)
    (view,) = views_of([tmp_path], ["ruler/vt"])
    (table,) = all_tables(view)
    shown = ["momentkv", "128", "128", "7.08", "1.45", "161", "13.1", "100.0 [100.0, 100.0]"]
    assert cells_of(table, table.objects[-1]) == [*shown, "+50.0 [+0.0, +100.0]", "adakv", "2"]
    assert cells_of(table, table.objects[0])[-3:] == ["-", "-", "2"]


@pytest.mark.parametrize("width", [100, 120])
def test_terminal_tables_fit_and_say_what_is_missing(run, width):
    text = terminal(views_of([run]), width)
    assert max(map(len, text.splitlines())) <= width
    assert "1 error: 1 out of memory" in text and "22/24" in text and "h2o@128 has 10 of 12" in text
    assert "ruler, budget 128" in text and "ruler, budget 256" in text
    flat = " ".join(text.split())
    assert re.search(r"momentkv +128 +128 +7\.08 +1\.45 +161 +13\.1 +\d+\.\d \[", text), flat[:2000]


def test_each_model_and_protocol_has_tables_of_its_own(run, tmp_path):
    rows = scored("ruler/vt", 4, WHOSE) + scored("ruler/vt", 4, WHOSE, protocol="agnostic")
    write_run(tmp_path, rows, model="other")
    views = views_of([run, tmp_path, tmp_path])
    assert [v.title for v in views[1:]] == ["other, question-aware", "other, question-agnostic"]
    assert all({o["protocol"] for t in all_tables(v) for o in t.objects} == {v.protocol} for v in views)
    assert [o["n"] for o in views[1].objects if o["task"] == "ruler/vt"] == [4] * len(WHOSE)


def test_tasks_filter_what_is_shown_and_not_what_is_averaged(run):
    (whole,) = views_of([run])
    (view,) = views_of([run], ["ruler/a*"])
    assert {o["task"] for o in view.objects} == {"ruler/avg"}
    assert view.objects == [o for o in whole.objects if o["task"] == "ruler/avg"]
    (family,) = views_of([run], ["niah"])
    assert {o["task"] for o in family.objects} == {"niah/grid", "niah/avg"}
    with pytest.raises(ResultsError, match=r"no task matches 'mmlu'; there are: ruler/vt, ruler/niah_single_1"):
        views_of([run], ["mmlu"])


def test_csv_holds_every_object(run):
    views = views_of([run])
    lines = list(csv.DictReader(io.StringIO(csv_text(views))))
    assert len(lines) == len(views[0].objects) and lines[0].keys() >= SCHEMA
    for line, o in zip(lines, views[0].objects, strict=True):
        assert float(line["value"]) == o["value"] and line["task"] == o["task"] and line["total"] == str(o["total"])
    assert {line["errors"] for line in lines if line["task"] == "ruler/vt"} == {"1"}


def test_latex_is_escaped_balanced_and_bold(run):
    text = latex_text(views_of([run]))
    bare = re.sub(r"\\[\\{}&%$#_]", "", text)
    assert bare.count("{") == bare.count("}")
    for line in bare.splitlines():
        assert "_" not in line and "#" not in line and (line.startswith("%") or "%" not in line), line
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") > 8
    assert r"\textless{}i\textgreater{}tiny" in text and r"\textbf{momentkv}" in text
    assert "10 of 12" in text and "1 error: 1 out of memory" in text
    assert r"\\ [" not in text and "$-$" in text  # a bracket after a line break would be its argument
    assert tex("a_b & 5 % \\ ^") == r"a\_b \& 5 \% \textbackslash{} \textasciicircum{}"
    for block in re.findall(r"\\begin\{tabular\}\{@\{\}(\w+)@\{\}\}(.*?)\\end\{tabular\}", text, re.DOTALL):
        rows = [line for line in block[1].splitlines() if line.endswith(r"\\")]
        assert {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(block[0])}


class Page(HTMLParser):
    """Tags that are open at the end, all addresses, and all text."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.open, self.links, self.words, self.tags, self.rows = [], [], [], [], []
        self.feed(source)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href", "action")]
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_data(self, data):
        if self.open[-1:] not in (["script"], ["style"]):
            self.words.append(data)


def test_the_page_is_whole_and_needs_nothing_else(run):
    source = html_text(views_of([run]))
    page = Page(source)
    text = " ".join(" ".join(page.words).split())
    assert not page.open and page.tags.count("script") == 1 and {"link", "img", "iframe"}.isdisjoint(page.tags)
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"https?://|url\(|@import", source)
    ids = re.findall(r' id="([^"]+)"', source)
    assert len(ids) == len(set(ids)) and {link[1:] for link in page.links} <= set(ids)
    assert "<script>alert(1)</script>" in text and "I do <b>not</b> know." in text and "<i>tiny" in text
    assert "b" not in page.tags and "i" not in page.tags  # escaped, all of it
    assert "h2o@128 has 10 of 12" in text and "1 error: 1 out of memory" in text and "versions.momentkv" in text


def test_every_variant_has_a_point_for_each_level_in_its_chart(run):
    (view,) = views_of([run], ["ruler/avg"])
    chart = chart_of(all_tables(view))
    assert {s.name: len(s.points) for s in chart.series} == {
        name_of(o): 2 for o in view.objects if o["level"] != "full"
    }
    drawn = {(s.kind, s.marker, s.colour, s.dash) for s in chart.series}
    assert len(drawn) == len(chart.series)  # no two look alike
    for series in chart.series:
        for p in series.points:
            assert p.high <= p.y <= p.low and 0 < p.x < RIGHT  # pixels count downwards
    assert chart.full[0] < min(p.y for s in chart.series if s.name == "random" for p in s.points)


def test_a_chart_of_distances_over_decades_is_logarithmic(run):
    (view,) = views_of([run], ["fidelity/avg"])
    tables = [t for t in all_tables(view) if t.metric == "kl"]
    chart = chart_of(tables)
    assert chart.full[0] is None and "off the axis" in chart.full[1]  # zero has no logarithm
    almost = [t for t in all_tables(view) if t.metric == "kl"]
    for o in (o for t in almost for o in t.objects if o["method"] == "full"):
        o |= {"value": 1e-9, "ci_low": 1e-9, "ci_high": 1e-9}
    assert chart_of(almost).y_ticks == chart.y_ticks  # rounding of the full cache does not stretch the axis
    by_name = {s.name: s.points for s in chart.series}
    assert by_name["random"][0].y < by_name["momentkv"][0].y


def test_points_are_spread_in_order_and_within_the_ends():
    placed = spread([50.0, 50.0, 50.0, 400.0, 52.0], 10, 500, gap=9)
    assert placed[:3] == [37.0, 46.0, 55.0] and placed[4] == 64.0 and placed[3] == 400.0
    assert spread([], 0, 1) == [] and spread([3.0], 0, 10) == [3.0]
    edge = spread([1.0, 1.0, 1.0], 0, 100, gap=10)
    assert edge == [0.0, 10.0, 20.0]
    crowd = sorted(spread([5.0] * 50, 0, 100, gap=10))
    assert crowd[0] >= 0 and crowd[-1] <= 100 and min(b - a for a, b in pairwise(crowd)) > 1.5


@pytest.mark.parametrize(
    ("low", "high", "log", "labels"),
    [
        (0, 100, False, ["0", "20", "40", "60", "80", "100"]),
        (0.1, 0.13, False, ["0.1", "0.105", "0.11", "0.115", "0.12", "0.125", "0.13"]),
        (1, 1000, True, ["1", "10", "100", "1000"]),
        (5.6, 24, True, ["6", "8", "10", "15", "20"]),
    ],
)
def test_ticks_are_round(low, high, log, labels):
    assert [label for _, label in Scale(((low, 0), (high, 100)), log).ticks()] == labels


def test_needle_maps_hold_the_mean_of_their_cell(run):
    (view,) = views_of([run])
    maps = heat_maps(view)
    assert len(maps) == len(WHOSE) and (maps[0].name, maps[0].level) == ("full", "full")
    assert (maps[0].lengths, maps[0].depths) == (["1,024", "2,048"], ["0%", "33%", "67%", "100%"])
    wanted = next(m for m in maps if (m.name, m.level) == ("snapkv", "128"))
    for row in view.results.rows:
        if row["task"] == "niah/grid" and row["variant"] == "snapkv@128":
            column, line = row["facts"]["length"] // 1024 - 1, round(row["facts"]["depth"] * 3)
            cell = wanted.cells[line][column]
            assert cell.text == f"{100 * row['values']['recall']:.0f}" and cell.title == "n = 1"
    assert not heat_maps(views_of([run], ["ruler"])[0])


def args(*dirs, **changed) -> Namespace:
    return Namespace(**{"dirs": [str(d) for d in dirs], "format": "all", "out": None, "tasks": None} | changed)


def test_all_formats_go_into_the_first_folder(tmp_path, capsys):
    a, b = (write_run(tmp_path / name, scored("ruler/vt", 3, WHOSE), model=name) for name in "ab")
    assert report.run(args(a, b)) == 0
    out, err = capsys.readouterr()
    assert "a, question-aware" in out and "b, question-aware" in out
    assert err.splitlines() == [f"wrote {a / name}" for name in ("report.csv", "report.tex", "report.html")]
    assert {p.name for p in a.iterdir()} - {p.name for p in b.iterdir()} == {"report.csv", "report.tex", "report.html"}


@pytest.mark.parametrize(
    ("format", "out", "written"),
    [
        ("csv", None, "run/report.csv"),
        ("csv", "x.csv", "x.csv"),
        ("latex", "new/t.tex", "new/t.tex"),
        ("html", "new", "new/report.html"),
        ("terminal", "t.txt", "t.txt"),
        ("terminal", None, None),
    ],
)
def test_one_format_goes_where_it_is_sent(tmp_path, capsys, format, out, written):
    folder = write_run(tmp_path / "run", scored("ruler/vt", 3, WHOSE))
    before = set(tmp_path.rglob("*"))
    assert report.run(args(folder, format=format, out=out and str(tmp_path / out))) == 0
    files = {p for p in set(tmp_path.rglob("*")) - before if p.is_file()}
    assert files == ({tmp_path / written} if written else set())
    assert bool(capsys.readouterr().out) == (written is None)


def test_show_prints_intervals_of_the_tasks_asked_for(run, capsys):
    report.show([run], ["ruler/vt"])
    out = capsys.readouterr().out
    assert "ruler/vt, recall" in out and "every task" not in out and "ruler/avg, score" not in out


def test_half_a_surrogate_pair_in_a_prediction_is_written(tmp_path):
    write_run(tmp_path, rows_of({"adakv": [1.0, 0.0]}, pred="\ud83d cut", answers=["x"]))
    assert report.run(args(tmp_path, format="html")) == 0
    assert "? cut" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_names_are_short_in_tables_and_long_elsewhere():
    fields = variant("adakv", matched="momentkv") | {"matched": ""}
    assert (short_name(fields), name_of(fields)) == ("adakv 7.08MiB", "adakv, equal bytes")
    assert short_name(fields | {"budget": "varies"}) == "adakv, equal bytes"
