"""momentkv in transformers: the cache, the attention switch, and a prefill to compress many times."""

from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.prefill import Prefill, prefill
from momentkv.hf.saving import CacheFileError

__all__ = ["CacheFileError", "MomentCache", "Prefill", "attend", "prefill"]
