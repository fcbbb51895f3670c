"""The methods by name, with their papers, defaults and the published variants as presets."""

import dataclasses
from dataclasses import dataclass, field
from typing import Any

from momentkv.policies import POLICIES
from momentkv.policies.base import one_of
from momentkv.settings import Settings

_FIELDS = tuple(f.name for f in dataclasses.fields(Settings))


@dataclass(frozen=True)
class Method:
    """A named point in the space of settings.

    paper: what to cite. about: one line. settings: our defaults, None for the full cache. presets: by name, what
    differs and a line saying whose variant it is.
    """

    paper: str
    about: str
    settings: Settings | None
    presets: dict[str, tuple[str, dict[str, Any]]] = field(default_factory=dict)


_AS_PUBLISHED: dict[str, Any] = {"sinks": 0, "decoding": "grow"}
_SNAPKV_PRESETS: dict[str, tuple[str, dict[str, Any]]] = {
    "original": ("the authors' class: window 64, kernel 5", {**_AS_PUBLISHED, "window": 64, "kernel": 5}),
    "scripts": ("the paper's scripts: window 32, max, kernel 7", {**_AS_PUBLISHED, "pool": "max"}),
    "kvpress": ("kvpress 0.5: window 64, kernel 5", {**_AS_PUBLISHED, "window": 64, "kernel": 5}),
    "kvcf": ("KVCache-Factory: window 8, max, kernel 7", {**_AS_PUBLISHED, "window": 8, "pool": "max"}),
}
_ONE_SHOT: dict[str, tuple[str, dict[str, Any]]] = {
    "kvpress": ("kvpress 0.5: prefill only, no sinks", dict(_AS_PUBLISHED)),
}

METHODS: dict[str, Method] = {
    "full": Method("-", "keep everything: transformers' own cache", None),
    "streaming": Method(
        "StreamingLLM, arXiv 2309.17453",
        "sinks and the most recent tokens",
        Settings(score="streaming", window=1),
        {"one-shot": ("kvpress, KVCache-Factory: evict after the prefill only", {"decoding": "grow"})},
    ),
    "h2o": Method(
        "H2O, arXiv 2306.14048",
        "attention accumulated over all queries; half of the budget for recent tokens",
        Settings(score="h2o", recent_share=0.5, window=1),
        {
            "kvpress": (
                "mean instead of sum, prefill only, of recent tokens only the newest",
                {**_AS_PUBLISHED, "mean": True, "recent_share": None},
            ),
            "kvcf": ("prefill only, 8 recent tokens", {**_AS_PUBLISHED, "recent_share": None, "window": 8}),
        },
    ),
    "tova": Method(
        "TOVA, arXiv 2401.06104", "attention of the last query, mean over heads", Settings(score="tova", window=1)
    ),
    "snapkv": Method(
        "SnapKV, arXiv 2404.14469",
        "pooled attention of the last 32 queries",
        Settings(score="snapkv"),
        _SNAPKV_PRESETS,
    ),
    "pyramidkv": Method(
        "PyramidKV, arXiv 2406.02069",
        "SnapKV's scores, budgets that fall with depth",
        Settings(score="snapkv", allocation="pyramid"),
        {
            "original": ("the paper's scripts: window 8, max, kernel 7", {**_AS_PUBLISHED, "window": 8, "pool": "max"}),
        },
    ),
    "adakv": Method(
        "Ada-KV, arXiv 2407.11550",
        "SnapKV's scores, heads of a layer compete for its budget (alpha 0.2)",
        Settings(score="snapkv", allocation="adaptive"),
        {
            "original": ("the authors' scripts: max, kernel 7", {**_AS_PUBLISHED, "pool": "max"}),
            "library": ("the authors' library default: alpha 0.5", {**_AS_PUBLISHED, "pool": "max", "alpha": 0.5}),
            "kvpress": (
                "kvpress 0.5: a hard floor, window 64, kernel 5",
                {**_AS_PUBLISHED, "allocation": "adaptive-floor", "window": 64, "kernel": 5},
            ),
        },
    ),
    "knorm": Method(
        "Knorm, arXiv 2406.11430", "keys of small norm", Settings(score="knorm", window=1), dict(_ONE_SHOT)
    ),
    "keydiff": Method(
        "KeyDiff, arXiv 2504.15364", "keys unlike the mean key", Settings(score="keydiff", window=1), dict(_ONE_SHOT)
    ),
    "random": Method("-", "a random subset: the trivial anchor", Settings(score="random", window=1), dict(_ONE_SHOT)),
    "momentkv": Method(
        "MomentKV, arXiv 2606.01563",
        "Ada-KV's selection and a first-order correction for what was evicted",
        Settings(score="snapkv", allocation="adaptive", correction="first"),
        {
            "paper": (
                "the paper: moment-informed eviction, one sink, blocks of 4, Jensen mass",
                {
                    "score": "moment",
                    "sinks": 1,
                    "window": 32,
                    "decode_window": 0,
                    "block": 4,
                    "rounds": 4,
                    "correction": "first",
                    "mass": "jensen",
                },
            ),
        },
    ),
}


def _apply(settings: Settings, changes: dict[str, Any], where: str) -> Settings:
    own = {name: value for name, value in changes.items() if name in _FIELDS}
    score = own.get("score", settings.score)
    policy_fields = POLICIES[score].options() if score in POLICIES else ()
    kept = settings.options if score == settings.score else {}
    options = {**kept, **own.pop("options", {})}
    for name, value in changes.items():
        if name in _FIELDS:
            continue
        if name not in policy_fields:
            valid = ", ".join(sorted({*_FIELDS, *policy_fields} - {"options"}))
            raise ValueError(f"{where} has no option {name!r}; valid: {valid}")
        options[name] = value
    return dataclasses.replace(settings, **own, options=options)


def settings_for(method: str, preset: str | None = None, **overrides: Any) -> Settings | None:
    """The settings of a method, a preset on top, overrides on top of both; None for the full cache.

    Args:
        method: a name of `METHODS`, or "name:preset".
        preset: a preset of that method; None for our defaults.
        overrides: fields of `Settings`, or options of the score's policy such as `kernel`.

    Raises:
        ValueError: an unknown method, preset or option, naming the valid ones.
    """
    if ":" in method:
        method, _, named = method.partition(":")
        if preset is not None and preset != named:
            raise ValueError(f"two presets given for {method!r}: {named!r} and {preset!r}")
        preset = named
    one_of("method", method, METHODS)
    entry = METHODS[method]
    changes: dict[str, Any] = {}
    if preset is not None:
        if preset not in entry.presets:
            valid = ", ".join(entry.presets) or "none"
            raise ValueError(f"method {method!r} has no preset {preset!r}; valid: {valid}")
        changes = entry.presets[preset][1]
    if entry.settings is None:
        if overrides:
            raise ValueError(f"method 'full' keeps everything and takes no options, not {', '.join(overrides)}")
        return None
    settings = _apply(entry.settings, changes, f"method {method!r}") if changes else entry.settings
    return _apply(settings, overrides, f"method {method!r}") if overrides else settings
