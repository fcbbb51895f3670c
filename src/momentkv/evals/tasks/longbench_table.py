"""LongBench's tasks: metric, length of the answer, and the paper's categories."""

# metric (`momentkv.evals.metrics.METRICS`), new tokens
TASKS: dict[str, tuple[str, int]] = {
    "narrativeqa": ("f1", 128),
    "qasper": ("f1", 128),
    "multifieldqa_en": ("f1", 64),
    "multifieldqa_zh": ("f1_zh", 64),
    "hotpotqa": ("f1", 32),
    "2wikimqa": ("f1", 32),
    "musique": ("f1", 32),
    "dureader": ("rouge_l_zh", 128),
    "gov_report": ("rouge_l", 512),
    "qmsum": ("rouge_l", 512),
    "multi_news": ("rouge_l", 512),
    "vcsum": ("rouge_l_zh", 512),
    "trec": ("classification", 64),
    "triviaqa": ("f1", 32),
    "samsum": ("rouge_l", 128),
    "lsht": ("classification", 64),
    "passage_count": ("count", 32),
    "passage_retrieval_en": ("retrieval", 32),
    "passage_retrieval_zh": ("retrieval_zh", 32),
    "lcc": ("code_similarity", 64),
    "repobench-p": ("code_similarity", 64),
}

# English tasks by category, as MomentKV (arXiv 2606.01563) averages them
CATEGORIES: dict[str, tuple[str, ...]] = {
    "single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarisation": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
ENGLISH = tuple(task for tasks in CATEGORIES.values() for task in tasks)

# LongBench-E has all English tasks but three
EXTENDED = tuple(task for task in ENGLISH if task not in ("narrativeqa", "musique", "qmsum"))

FIRST_LINE = ("trec", "triviaqa", "samsum", "lsht")  # only the first line of the answer counts
NO_CHAT = (*FIRST_LINE, "lcc", "repobench-p")  # never in a chat template
STOPS: dict[str, tuple[str, ...]] = {"samsum": ("\n",)}
