"""What differs between the versions of transformers that momentkv supports."""

from typing import Any

import transformers
from packaging.version import Version

_RENAMED = Version("5.23")  # from here on `past_key_values` is called `cache`, and the old name warns


def cache_argument(cache: Any) -> dict[str, Any]:
    """The keyword argument that hands a cache to a model's `forward` or `generate`, by the installed version."""
    new = Version(transformers.__version__) >= _RENAMED
    return {"cache" if new else "past_key_values": cache}
