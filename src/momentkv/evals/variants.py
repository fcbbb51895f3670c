"""What a run compares: methods, budgets, trivial anchors, and plain eviction at the bytes of each corrected method."""

import ast
import fnmatch
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from momentkv.budgets import Budget
from momentkv.layer import spec_nbytes
from momentkv.methods import METHODS, settings_for
from momentkv.settings import Settings
from momentkv.summary import summary_spec

ANCHORS = ("random", "streaming", "knorm")
PLAIN = ("snapkv", "adakv")  # the eviction that corrected methods stand on
FULL = "full"


@dataclass(frozen=True)
class Variant:
    """One row of a table.

    method: a name of `METHODS`, settings changed after it as `snapkv+correction=zeroth`. preset: or None.
    budget: as given to `MomentCache`; None where it is the bytes that `matched` holds. level: the budget asked for.
    matched: the corrected variant whose bytes this plain one gets, or None.
    """

    method: str
    preset: str | None
    budget: str | None
    level: str
    matched: "Variant | None" = None

    @property
    def match(self) -> str:
        """What is equal among the variants of a level: "tokens", or "bytes" for one that was given another's bytes."""
        return "tokens" if self.matched is None else "bytes"

    @property
    def name(self) -> str:
        """Method and preset in one word, as on the command line."""
        base, plus, changes = self.method.partition("+")
        return base + (f":{self.preset}" if self.preset else "") + plus + changes

    @property
    def key(self) -> str:
        """Unique in a run: `name@level`, and where it has another's bytes, whose."""
        return f"{self.name}@{self.level}" + (f" (bytes of {self.matched.name})" if self.matched else "")

    @property
    def options(self) -> dict[str, Any]:
        """The settings changed in the method's name."""
        return _options(self.method)

    @property
    def settings(self) -> Settings | None:
        """None for the full cache."""
        return settings_for(self.method.partition("+")[0], self.preset, **self.options)

    @property
    def corrected(self) -> bool:
        """Whether the output is corrected for what was evicted."""
        settings = self.settings
        return settings is not None and settings.correction != "off"


def _options(method: str) -> dict[str, Any]:
    options = {}
    for change in filter(None, method.partition("+")[2].split("+")):
        name, equals, text = change.partition("=")
        if not equals or not text:
            raise ValueError(f"method {method!r}: {change!r} is not a setting; write METHOD+NAME=VALUE")
        try:
            options[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[name] = text
    return options


def _named(text: str) -> list[tuple[str, str | None]]:
    """Method and preset of one name or glob; "all" are all methods and the paper's preset."""
    if text == "all":
        return [(name, None) for name in METHODS if name != FULL] + [("momentkv", "paper")]
    if any(c in text for c in "*?["):
        presets = [(name, preset) for name, m in METHODS.items() for preset in (None, *m.presets)]
        found = [(n, p) for n, p in presets if n != FULL and fnmatch.fnmatch(n + (f":{p}" if p else ""), text)]
        if not found:
            raise ValueError(f"no method matches {text!r}; valid: all, {', '.join(METHODS)}")
        return found
    head, plus, changes = text.partition("+")
    base, _, preset = head.partition(":")
    settings_for(base, preset or None, **_options(text))  # raises for what does not exist
    return [(base + plus + changes, preset or None)]


def _summary_nbytes(settings: Settings) -> int:
    """Of one head of 64 dimensions: summaries of equal size need only one plain counterpart."""
    return spec_nbytes(summary_spec(settings, 1, 64, 64))


def variants_of(methods: Sequence[str], budgets: Sequence[str]) -> list[Variant]:
    """Everything to run: the full cache, the anchors, the methods asked for, and plain eviction at equal bytes.

    Args:
        methods: names as `snapkv`, `momentkv:paper`, `adakv+correction=first`, globs, or `all`.
        budgets: as `Budget.parse` takes them. Those in bytes or te bind the total already: nothing is matched there.

    Raises:
        ValueError: an unknown method, preset, setting or budget, or a budget that is asked for twice.
    """
    names = dict.fromkeys(named for text in methods for named in _named(text))
    names = dict.fromkeys([*((a, None) for a in ANCHORS), *names])
    names.pop((FULL, None), None)
    levels = [str(Budget.parse(b)) for b in budgets]
    if repeated := {b for b in levels if levels.count(b) > 1}:
        raise ValueError(f"budget {sorted(repeated)[0]!r} is asked for twice")
    if not levels:
        raise ValueError("at least one budget is needed")
    variants = [Variant(FULL, None, None, FULL)]
    for level in levels:
        asked = [Variant(method, preset, level, level) for method, preset in names]
        matched: dict[int, Variant] = {}
        for variant in asked:
            if variant.corrected and Budget.parse(level).kind in ("tokens", "share"):
                matched.setdefault(_summary_nbytes(variant.settings or Settings()), variant)
        variants += asked
        variants += [Variant(p, None, None, level, other) for other in matched.values() for p in PLAIN]
    return variants
