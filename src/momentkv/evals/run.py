"""The job of `momentkv eval`."""

import itertools
import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from momentkv.evals import spec as specs
from momentkv.evals.measure import Setup, check, measure
from momentkv.evals.rows import RowFile, merge_parts
from momentkv.evals.summary import write_summary
from momentkv.evals.task import Sample, Source, Task, TaskError
from momentkv.evals.tasks import tasks_of
from momentkv.evals.tasks.fidelity import Fidelity
from momentkv.evals.variants import Variant, variants_of
from momentkv.hf import models
from momentkv.hf.attention import NAME
from momentkv.hf.prompt import Turn, note

Work = tuple[Task, Sample]


@contextmanager
def _only_process(folder: Path, part: str) -> Iterator[None]:
    """Two processes that write the same rows would ruin them."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder / f".lock{part}")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ValueError(f"another process is writing to {str(folder)!r}: wait for it, or use another --out") from None
    try:
        yield
    finally:
        lock.release()


def source_of(args: Namespace, tokenizer: Any) -> Source:
    """Where the samples of this run come from."""
    data = Path(args.data) if args.data else None
    if data is not None and not data.is_dir():
        raise TaskError(f"--data {args.data!r} is not a folder")
    return Source(
        tokenizer,
        data,
        tuple(map(Path, args.texts)),
        args.limit,
        args.seed,
        args.length,
        args.max_length,
        args.max_tokens,
        not args.no_chat_template,
        args.follow,
    )


def options_of(args: Namespace, tasks: list[Task], variants: list[Variant]) -> dict[str, Any]:
    """What defines a run and is known before the model is loaded, as JSON values."""
    return {
        "model": args.model,
        "tasks": [task.full_name for task in tasks],
        "methods": args.methods,
        "budgets": args.budgets,
        "protocol": args.protocol,
        **{n: getattr(args, n) for n in ("limit", "seed", "length", "max_length", "max_tokens", "follow")},
        "template": not args.no_chat_template,
        "backend": f"{NAME} (prefill: sdpa)",
        "variants": [v.key for v in variants],
        "versions": specs.versions(),
    }


def spec_of(options: dict[str, Any], model: Any, samples: dict[str, list[Sample]]) -> dict[str, Any]:
    """Everything that defines a run, as JSON values."""
    return {
        **options,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": model.device.type,
        "samples": {task: len(own) for task, own in samples.items()},
        "data": {task: specs.fingerprint(own) for task, own in samples.items()},
    }


def rank_and_world() -> tuple[int, int]:
    """This process's number and how many there are, as torchrun and accelerate say it."""
    return int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def failure_of(error: BaseException) -> tuple[str, str]:
    """What kind of failure it was, and one line about it."""
    memory = isinstance(error, torch.OutOfMemoryError | MemoryError) or "allocate memory" in str(error)
    return "out of memory" if memory else type(error).__name__, " ".join(str(error).split())[:500]


def evaluate(setup: Setup, work: list[Work], rows: RowFile, advance: Any) -> int:
    """Measure what is missing, in order; a sample that fails is recorded and the rest goes on.

    Returns:
        The number of samples that failed.

    Raises:
        OSError: rows cannot be written any more.
    """
    failed = 0
    for task, sample in work:
        if any((task.full_name, sample.id, v.key) not in rows.done for v in setup.variants):
            try:
                measure(setup, task, sample, rows.write)
            except OSError:
                raise
            except Exception as error:
                failed += 1
                kind, message = failure_of(error)
                rows.fail(task.full_name, sample.id, kind, message)
                note(f"{task.full_name} {sample.id}: {kind}: {message}")
                if setup.model.device.type == "cuda":
                    torch.cuda.empty_cache()
        advance(f"{task.full_name} {sample.id}")
    return failed


@contextmanager
def progress(total: int) -> Iterator[Any]:
    """A bar with the time left on a terminal, else a line per sample; on stderr."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    count = 0
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task("evaluating", total=total)

    def advance(text: str) -> None:
        nonlocal count
        count += 1
        bar.update(task, advance=1, description=text)
        if not console.is_terminal:
            note(f"{count} of {total}: {text}")

    with bar:
        yield advance


def _wait_for_all(world: int) -> None:
    """Until every process of this run has come here."""
    from datetime import timedelta

    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    dist.barrier()


def _samples(tasks: list[Task], source: Source) -> dict[str, list[Sample]]:
    samples = {}
    for task in tasks:
        samples[task.full_name] = task.samples(source)
        if not samples[task.full_name]:
            note(f"{task.full_name}: no samples (of at most {source.max_tokens} tokens)")
    if not any(samples.values()):
        raise TaskError("no samples at all")
    return samples


def in_turns(tasks: list[Task], samples: dict[str, list[Sample]]) -> list[Work]:
    """The first sample of every task, then the second: what a run that is cut short has measured is balanced."""
    rounds = itertools.zip_longest(*([(task, sample) for sample in samples[task.full_name]] for task in tasks))
    return [work for one in rounds for work in one if work is not None]


def run(args: Namespace) -> int:
    """Run `momentkv eval`; the arguments are those of the command line. Returns 0, or 1 when samples failed."""
    variants = variants_of(args.methods, args.budgets)
    tasks = tasks_of(args.tasks, [Path(p) for p in args.texts])
    folder, (rank, world) = Path(args.out), rank_and_world()
    options = options_of(args, tasks, variants)
    specs.check(folder, options)
    if args.texts and not any(task.family in ("fidelity", "niah") for task in tasks):
        note("--texts is not used: none of these tasks takes texts")
    model, tokenizer = models.load(
        args.model, device=args.device, dtype=args.dtype, offline=args.offline, trust_remote_code=args.trust_remote_code
    )
    if not args.no_chat_template and not all(isinstance(task, Fidelity) for task in tasks):
        Turn.of(tokenizer)
    setup = Setup(model, tokenizer, variants, args.protocol, not args.no_chat_template)
    check(setup)
    samples = _samples(tasks, source_of(args, tokenizer))
    folder.mkdir(parents=True, exist_ok=True)
    with _only_process(folder, f".{rank}" if world > 1 else ""):
        specs.settle(folder, spec_of(options, model, samples))
        work = in_turns(tasks, samples)
        if args.engine == "ray":
            from momentkv.evals.ray_engine import evaluate_with_ray

            failed = evaluate_with_ray(args, work, variants, folder)
        else:
            mine = work[rank::world]
            rows = RowFile(folder, str(rank) if world > 1 else "")
            with progress(len(mine)) as advance:
                failed = evaluate(setup, mine, rows, advance)
        if world > 1:
            _wait_for_all(world)
    if rank == 0:
        merge_parts(folder)
        _finish(folder)
    if failed:
        note(f"{failed} of {len(work)} samples failed: see {folder / 'errors.jsonl'}; start again to try them again")
    return 1 if failed else 0


def _finish(folder: Path) -> None:
    from momentkv.evals.report import show

    write_summary(folder)
    try:
        show([folder])
    except ModuleNotFoundError as error:
        note(f"no tables: {error}")
