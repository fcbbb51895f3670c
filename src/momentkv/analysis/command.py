"""The job of `momentkv paper`."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from momentkv.hf import models
from momentkv.hf.prompt import note


def _figures() -> dict[str, Any]:
    """Those measured here, by name; figure 4 is drawn from a run of the harness."""
    try:
        from momentkv.analysis import figure_1b, figure_2, figure_3
    except ModuleNotFoundError as error:
        raise ValueError(f"the figures need {error.name}: pip install 'momentkv[eval]'") from error
    return {"1b": figure_1b.figure, "2": figure_2.figure, "3": figure_3.figure}


def run(args: Namespace) -> int:
    """Run `momentkv paper`; the arguments are those of the command line. Returns 0, or 1 when samples failed."""
    if args.table is not None:
        from momentkv.analysis import tables

        return tables.run(args)
    figures, folder, status = _figures(), Path(args.out), 0
    if args.figure == "4":
        from momentkv.analysis import figure_4

        caption, status = figure_4.figure(args)
    else:
        model, tokenizer = models.load(
            args.model,
            device=args.device,
            dtype=args.dtype,
            offline=args.offline,
            trust_remote_code=args.trust_remote_code,
        )
        folder.mkdir(parents=True, exist_ok=True)
        caption = figures[args.figure](model, tokenizer, args)
    print(caption)
    note(f"written: {folder / f'figure-{args.figure}'}.svg, .png and .csv")
    return status
