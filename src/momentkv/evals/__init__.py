"""Measuring what compression costs."""

from momentkv.evals.attention_error import AttentionError, attention_error, split_evidence

__all__ = ["AttentionError", "attention_error", "split_evidence"]
