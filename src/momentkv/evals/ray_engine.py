"""`--engine ray`: Ray Data spreads the samples over workers, each with its own model; the driver alone writes."""

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

from momentkv.evals.measure import Setup, measure
from momentkv.evals.rows import RowFile
from momentkv.evals.run import Work, failure_of, progress
from momentkv.evals.variants import Variant
from momentkv.hf import models


class Worker:
    """A model in a Ray actor. Calling it with a batch of one sample gives one record: rows, or what went wrong."""

    def __init__(self, args: Namespace, variants: list[Variant]) -> None:
        model, tokenizer = models.load(args.model, device=args.device, dtype=args.dtype, offline=args.offline)
        self.setup = Setup(model, tokenizer, variants, args.protocol, not args.no_chat_template)

    def __call__(self, batch: dict[str, Any]) -> dict[str, list[Any]]:
        task, sample = batch["item"][0]
        rows: list[dict[str, Any]] = []
        failed = None
        try:
            measure(self.setup, task, sample, rows.append)
        except Exception as error:
            failed = failure_of(error)
        return {"item": [(task.full_name, sample.id, rows, failed)]}


def evaluate_with_ray(args: Namespace, work: list[Work], variants: list[Variant], folder: Path) -> int:
    """As `run.evaluate`, on the Ray cluster that is running (`RAY_ADDRESS`), or a local one.

    Returns:
        The number of samples that failed.

    Raises:
        ValueError: Ray is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("--engine ray needs Ray: pip install 'momentkv[ray]'") from error
    rows = RowFile(folder)
    missing = [
        (task, sample)
        for task, sample in work
        if any((task.full_name, sample.id, v.key) not in rows.done for v in variants)
    ]
    if not missing:
        return 0
    if not ray.is_initialized():
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    dataset = ray.data.from_items(missing, override_num_blocks=len(missing)).map_batches(
        Worker,
        fn_constructor_args=(args, variants),
        concurrency=args.workers,
        batch_size=1,
        num_cpus=0,  # a model uses what it finds; asking for CPUs would leave none for Ray's own reading tasks
        num_gpus=1 if args.device.startswith("cuda") else None,
    )
    failures = 0
    with progress(len(missing)) as advance:
        for record in dataset.iter_rows():
            task, sample, measured, failed = record["item"]
            for row in measured:
                rows.write(row)
            if failed:
                failures += 1
                rows.fail(task, sample, *failed)
            advance(f"{task} {sample}")
    return failures
