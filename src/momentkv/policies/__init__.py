"""Eviction policies: one method per file, each a score and nothing else."""

from momentkv.policies.base import Evidence, Policy
from momentkv.policies.h2o import H2O
from momentkv.policies.keydiff import KeyDiff
from momentkv.policies.knorm import Knorm
from momentkv.policies.moment import MomentResidual
from momentkv.policies.random import Random
from momentkv.policies.snapkv import SnapKV
from momentkv.policies.streaming import Streaming
from momentkv.policies.tova import Tova

POLICIES: dict[str, type[Policy]] = {
    "streaming": Streaming,
    "h2o": H2O,
    "tova": Tova,
    "snapkv": SnapKV,
    "knorm": Knorm,
    "keydiff": KeyDiff,
    "random": Random,
    "moment": MomentResidual,
}

__all__ = [
    "H2O",
    "POLICIES",
    "Evidence",
    "KeyDiff",
    "Knorm",
    "MomentResidual",
    "Policy",
    "Random",
    "SnapKV",
    "Streaming",
    "Tova",
]
