"""The options of `momentkv eval`, `momentkv paper`, `momentkv report` and `momentkv score`."""

import argparse
from typing import Any

PROTOCOLS = ("aware", "agnostic")
FIGURES = ("1b", "2", "3", "4")
TASKS = "names, families or globs: longbench, longbench-e, ruler, ruler/vt, 'ruler/niah*', niah, fidelity"


def _list(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not parts:
        raise argparse.ArgumentTypeError(f"at least one is needed, separated by commas; got {text!r}")
    return parts


def _model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help='a model folder, a Hugging Face id, or "demo"')
    add("--no-chat-template", action="store_true", help="give the model the text as it is")
    add("--device", default="auto", help='"auto" (default), "cpu", "cuda" or another torch device')
    add("--dtype", default="auto", help='"auto" (default), "float32", "bfloat16" or "float16"')
    add("--offline", action="store_true", help="never use the network")
    add("--trust-remote-code", action="store_true", help="run the Python code that the model brings")


def _samples(parser: argparse.ArgumentParser, count: Any, positive: Any) -> None:
    """What is measured on, but for the tasks."""
    add = parser.add_argument
    add(
        "--protocol",
        choices=PROTOCOLS,
        default="aware",
        help="aware (default): the question is compressed with its "
        "context; agnostic: the context is compressed before the question is read",
    )
    add("--data", metavar="DIR", help="local data: DIR/longbench/, DIR/longbench_e/, DIR/ruler/; default: the hub")
    add("--texts", nargs="+", default=[], metavar="FILE", help="UTF-8 texts for fidelity, niah and figures")
    add("--limit", type=positive, metavar="N", help="samples per task, passages per text; default: all samples")
    add(
        "--length",
        type=positive,
        default=4096,
        metavar="N",
        help="tokens of a RULER, niah or fidelity sample, or of a figure's passage; default 4096",
    )
    add(
        "--max-length",
        type=positive,
        default=31500,
        metavar="N",
        help="LongBench prompts above it lose their middle; default 31500",
    )
    add("--max-tokens", type=positive, metavar="N", help="leave out LongBench samples with longer prompts")
    add(
        "--follow",
        type=positive,
        default=128,
        metavar="N",
        help="tokens after the prompt of fidelity and figures; fidelity shows from 1024 on those from 512 apart; "
        "default 128",
    )
    add("--seed", type=count, default=42, metavar="N", help="of everything that is drawn; default 42")


def _eval(parser: argparse.ArgumentParser, count: Any, positive: Any) -> None:
    add = parser.add_argument
    add("--tasks", type=_list, required=True, metavar="T,...", help=TASKS)
    add(
        "--methods",
        type=_list,
        default=["all"],
        metavar="M,...",
        help="METHOD, METHOD:PRESET, METHOD+NAME=VALUE, "
        "globs, or all (default); the full cache and random, streaming and knorm always run",
    )
    add("--budgets", type=_list, default=["128"], metavar="B,...", help="as for generate; default 128")
    add("--out", required=True, metavar="DIR", help="where rows, summary and specification go; a run in it goes on")
    _samples(parser, count, positive)
    add("--engine", choices=("local", "ray"), default="local", help="local (default; shards under torchrun), or ray")
    add("--workers", type=positive, default=1, metavar="N", help="ray: how many models at once; default 1")
    _model(parser)


def _paper(parser: argparse.ArgumentParser, count: Any, positive: Any) -> None:
    add = parser.add_argument
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--table", type=positive, metavar="N", help="a table of the paper")
    which.add_argument("--figure", choices=FIGURES, help="a figure of the paper")
    add("--tasks", type=_list, metavar="T,...", help=f"{TASKS}; default: the paper's")
    add("--budgets", type=_list, metavar="B,...", help="as for generate; default: the paper's")
    add("--layer", type=count, metavar="N", help="figure 1b: from 0; default: chosen by the median cosine")
    add("--head", type=count, metavar="N", help="figure 1b: query head, from 0; default: chosen by the median cosine")
    add("--out", default="paper", metavar="DIR", help='where files and runs go; a run in it goes on; default "paper"')
    _samples(parser, count, positive)
    _model(parser)
    parser.set_defaults(methods=["all"], engine="local", workers=1)  # what a run of the harness takes besides


def add_parsers(commands: Any, count: Any, positive: Any) -> None:
    """Add the evaluation commands to the command line. count, positive: types for whole numbers from 0 and from 1."""
    about = "measure methods and budgets on LongBench, RULER, niah and fidelity"
    _eval(commands.add_parser("eval", help=about, description=f"{about.capitalize()}."), count, positive)

    about = "the paper's tables and figures on any model"
    _paper(commands.add_parser("paper", help=about, description=f"{about.capitalize()}."), count, positive)

    report = commands.add_parser("report", help="tables and pages from the folders of runs")
    report.add_argument("dirs", nargs="+", metavar="DIR", help="folders that `momentkv eval --out` wrote")
    report.add_argument("--format", choices=("all", "terminal", "csv", "latex", "html"), default="all")
    report.add_argument("--out", metavar="PATH", help="where the files go; default: the first DIR")
    report.add_argument("--tasks", type=_list, metavar="T,...", help="only these, names or globs")

    about = "score predictions of LongBench or RULER made elsewhere"
    score = commands.add_parser("score", help=about, description=f"{about.capitalize()}.")
    score.add_argument("task", metavar="TASK", help="longbench/NAME or just NAME, longbench-e/NAME, ruler/NAME")
    score.add_argument("file", metavar="FILE", help="JSON lines with pred, answers, all_classes; '-' for stdin")


def dispatch(args: argparse.Namespace) -> int:
    """Run one of these commands."""
    if args.command == "eval":
        from momentkv.evals import run as job
    elif args.command == "paper":
        from momentkv.analysis import command as job  # type: ignore[no-redef]
    elif args.command == "score":
        from momentkv.evals import score as job  # type: ignore[no-redef]
    else:
        from momentkv.evals import report as job  # type: ignore[no-redef]
    return job.run(args)
