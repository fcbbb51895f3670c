"""momentkv: long-context inference in fixed memory. Importing it loads torch and nothing heavier.

The transformers part is `momentkv.hf`.
"""

from momentkv.budgets import Budget
from momentkv.compress import Chunk, candidates, compress
from momentkv.correction import estimate
from momentkv.decode import decode
from momentkv.layer import LayerState, state_spec
from momentkv.methods import METHODS, Method, settings_for
from momentkv.moments import Moments
from momentkv.policies import POLICIES, Evidence, Policy
from momentkv.report import Report
from momentkv.settings import Settings
from momentkv.state import AttnState, attend, merge

__version__ = "0.1.0"

__all__ = [
    "METHODS",
    "POLICIES",
    "AttnState",
    "Budget",
    "Chunk",
    "Evidence",
    "LayerState",
    "Method",
    "Moments",
    "Policy",
    "Report",
    "Settings",
    "attend",
    "candidates",
    "compress",
    "decode",
    "estimate",
    "merge",
    "settings_for",
    "state_spec",
]
