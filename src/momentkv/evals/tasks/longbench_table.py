"""LongBench's English tasks by category, as MomentKV (arXiv 2606.01563) averages them."""

CATEGORIES: dict[str, tuple[str, ...]] = {
    "single-doc QA": ("narrativeqa", "qasper", "multifieldqa_en"),
    "multi-doc QA": ("hotpotqa", "2wikimqa", "musique"),
    "summarisation": ("gov_report", "qmsum", "multi_news"),
    "few-shot": ("trec", "triviaqa", "samsum"),
    "synthetic": ("passage_count", "passage_retrieval_en"),
    "code": ("lcc", "repobench-p"),
}
