"""The command line: what it accepts, and where each command goes."""

import argparse
import json
import os
import sys
from dataclasses import asdict
from typing import Any

import torch

from momentkv import METHODS, Budget, Settings, __version__
from momentkv.budgets import FORMS
from momentkv.evals import options

_HF = ("transformers", "tokenizers", "safetensors", "rich", "huggingface_hub", "jinja2")


class _Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, allow_abbrev=False)

    def error(self, message: str) -> Any:
        self.exit(2, f"momentkv: error: {message}\n")


def _number(kind: type, low: float, high: float, meaning: str) -> Any:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {meaning}")
        return value

    return parse


_COUNT = _number(int, 0, 2**31, "a whole number of at least 0")
_POSITIVE = _number(int, 1, 2**31, "a whole number of at least 1")


def _budget(text: str) -> str:
    try:
        Budget.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help='"auto" (default), "cpu", "cuda" or another torch device')
    parser.add_argument("--dtype", default="auto", help='"auto" (default), "float32", "bfloat16" or "float16"')
    parser.add_argument("--offline", action="store_true", help="never use the network")


def _generate_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", metavar="MODEL", help='a model folder, a Hugging Face id, or "demo"')
    add("--prompt-file", metavar="FILE", help="UTF-8 text, '-' for stdin; with --prompt: what that is about")
    add("--prompt", metavar="TEXT", help="the prompt itself, '-' for stdin")
    add("--budget", type=_budget, help=f"{FORMS.replace('%', '%%')}; default 128")
    add("--method", help="METHOD or METHOD:PRESET, see `momentkv methods`; default momentkv")
    add("--preset", help="a published variant of the method")
    add("--set", action="append", default=[], metavar="NAME=VALUE", help="any setting, such as window=64; repeatable")
    add("--max-new-tokens", type=_COUNT, default=256, metavar="N", help="default 256; 0 only fills the cache")
    add("--temperature", type=_number(float, 0, 1e6, "a number of at least 0"), metavar="T", help="default: greedy")
    add(
        "--top-p", type=_number(float, 1e-9, 1, "a number above 0 and up to 1"), metavar="P", help="sample from the top"
    )
    add("--seed", type=_COUNT, metavar="N", help="for sampling")
    _model_options(parser)
    add("--trust-remote-code", action="store_true", help="run the Python code that the model brings")
    add("--no-chat-template", action="store_true", help="give the model the text as it is")
    add("--system", metavar="TEXT", help="the chat template's system message")
    add("--prefill-chunk", type=_POSITIVE, metavar="N", help="prefill N tokens at a time, which needs less memory")
    add("--save-cache", metavar="FILE", help="write the compressed prompt (of --prompt-file, if both are given)")
    add("--load-cache", metavar="FILE", help="continue after a saved prompt instead of reading it again")
    add("--report", action="store_true", help="print what the cache holds to stderr at the end")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="momentkv", description="Long-context inference in fixed memory.")
    parser.add_argument("--version", action="version", version=f"momentkv {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    methods = commands.add_parser("methods", help="list the methods, their papers, defaults and presets")
    methods.add_argument("--json", action="store_true", help="as one JSON document")

    about = "generate text with a compressed cache"
    _generate_options(commands.add_parser("generate", help=about, description=f"{about.capitalize()}."))

    demo = commands.add_parser("demo", help="compare methods on a long text with a fact hidden in it")
    demo.add_argument("--document", metavar="FILE", help="UTF-8 text; default: Python's language reference")
    demo.add_argument("--model", default="demo", help='a model folder, a Hugging Face id, or "demo" (default)')
    demo.add_argument("--budget", type=_budget, default="128", help="as for generate; default 128")
    demo.add_argument("--tokens", type=_POSITIVE, default=6000, metavar="N", help="of the text to read; default 6000")
    demo.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    _model_options(demo)
    options.add_parsers(commands, _COUNT, _POSITIVE)
    return parser


def _describe(settings: Settings | None) -> str:
    """The settings that tell methods apart: the score, what is protected, and what differs from the plain defaults."""
    if settings is None:
        return "-"
    plain, shown = asdict(Settings()), ("score", "sinks", "window", "correction")
    chosen = {k: v for k, v in asdict(settings).items() if k in shown or v != plain[k]}
    if settings.adaptive:
        chosen["alpha"] = settings.alpha
    return ", ".join(f"{name}={value}" for name, value in chosen.items())


def _methods(args: argparse.Namespace) -> int:
    if args.json:
        print(json.dumps({name: asdict(method) for name, method in METHODS.items()}, indent=2))
        return 0
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no width of its own
    table = Table("method", "paper", "what it keeps", "defaults", "presets", show_lines=True)
    table.columns[0].no_wrap = True
    for name, method in METHODS.items():
        presets = "\n".join(f"{preset}: {whose}" for preset, (whose, _) in method.presets.items())
        table.add_row(name, method.paper, method.about, _describe(method.settings), presets or "-")
    console.print(table)
    return 0


def _dispatch(args: argparse.Namespace) -> int:
    if args.command == "methods":
        return _methods(args)
    if args.command == "generate":
        from momentkv.hf import generate as job
    elif args.command == "demo":
        from momentkv.hf import demo as job  # type: ignore[no-redef]
    else:
        return options.dispatch(args)
    return job.run(args)


def _fail(message: str) -> int:
    print(f"momentkv: error: {' '.join(message.split())}", file=sys.stderr)
    return 2


def _message(error: BaseException) -> str:
    """Of the operating system's errors the file and what is wrong with it, without the number."""
    if isinstance(error, OSError) and error.filename is not None and error.strerror:
        return f"{str(error.filename)!r}: {error.strerror}"
    return str(error)


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Returns 0, 2 for an error, 130 after Ctrl-C, 1 when nobody reads the output any more."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        status = _dispatch(args)
        sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains again at exit
        return 1
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _HF:
            raise
        return _fail(f"this needs {error.name}: pip install 'momentkv[hf]'")
    except torch.OutOfMemoryError as error:
        return _fail(f"out of memory: {error}")
    except (ValueError, OSError, TypeError, NotImplementedError, FloatingPointError) as error:
        return _fail(_message(error))
    except RuntimeError as error:
        if "allocate memory" in str(error):  # the CPU allocator has no error of its own
            return _fail(f"out of memory: {str(error).splitlines()[0]}")
        if type(error).__name__ != "ModelError":  # named, not imported: momentkv.hf is loaded only by who needs it
            raise
        return _fail(str(error))


if __name__ == "__main__":
    sys.exit(main())
