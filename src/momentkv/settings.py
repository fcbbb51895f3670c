"""Everything that can be chosen about a compressed cache, as one frozen, validated value."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from momentkv.policies import POLICIES
from momentkv.policies.base import Policy, one_of

Allocation = Literal["uniform", "pyramid", "adaptive", "adaptive-floor"]
Correction = Literal["off", "zeroth", "first"]
Mass = Literal["jensen", "variance"]
Storage = Literal["centred", "raw-float16", "raw-bfloat16", "raw-float32"]
Decoding = Literal["evict", "grow"]

_CHOICES = {
    "allocation": Allocation,
    "correction": Correction,
    "mass": Mass,
    "moments": Storage,
    "decoding": Decoding,
}


class Options(dict[str, Any]):
    """A policy's options: a dict that cannot be changed, so that settings stay what was validated."""

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError("settings cannot be changed: make new ones")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = __ior__ = _refuse

    def __reduce__(self) -> Any:
        return Options, (dict(self),)


@dataclass(frozen=True)
class Settings:
    """Score, budget rule, selection and correction: independent axes, any combination runs.

    score: a policy (`momentkv.policies.POLICIES`), with `options` for its own fields.
    allocation: "uniform"; "pyramid" (across layers); "adaptive" (Ada-KV: across the heads of a layer, a convex mix
        with share `alpha` of the uniform budget); "adaptive-floor" (kvpress's Ada-KV: `alpha` as a hard floor).
    sinks: first tokens that are never evicted. window: observation window, and last tokens that a prefill never
        evicts. decode_window: the same while decoding; None = `window`. recent_share: protect this share of the
        budget as the most recent tokens instead of `window` (H2O: 0.5).
    block: adjacent tokens judged and kept together at prefill. rounds: eviction rounds of a prefill; only scores
        that depend on what has been evicted (`moment`) change with them.
    correction: "off", "zeroth" or "first" order. mass: "jensen" (the paper) or "variance", `log(1 + var/2)`, which
        also stores Cov(k,k). moments: "centred" fp32, or the paper's raw sums in the dtype named.
    decoding: "evict" keeps the budget while decoding; "grow" never evicts then, as the original SnapKV family.
    interval: decode steps between evictions; `interval` tokens go at once and the budget stays the ceiling.
    """

    score: str = "snapkv"
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    allocation: Allocation = "uniform"
    alpha: float = 0.2
    sinks: int = 4
    window: int = 32
    decode_window: int | None = None
    recent_share: float | None = None
    block: int = 1
    rounds: int = 1
    correction: Correction = "off"
    mass: Mass = "jensen"
    moments: Storage = "centred"
    decoding: Decoding = "evict"
    interval: int = 1

    def __post_init__(self) -> None:
        one_of("score", self.score, POLICIES)
        for name, choices in _CHOICES.items():
            one_of(name, getattr(self, name), get_args(choices))
        known = POLICIES[self.score].options()
        for name in self.options:
            if name not in known:
                raise ValueError(f"score {self.score!r} has no option {name!r}; valid: {', '.join(known) or 'none'}")
        for name, least in (("sinks", 0), ("window", 1), ("block", 1), ("rounds", 1), ("interval", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}={value!r}: must be a whole number of at least {least}")
        window = self.decode_window
        if window is not None and (not isinstance(window, int) or isinstance(window, bool) or window < 0):
            raise ValueError(f"decode_window={self.decode_window!r}: must be None or at least 0")
        for name in ("alpha", "recent_share"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is None and name == "recent_share":
                continue
            if not number or not 0 <= value <= 1:
                raise ValueError(f"{name}={value!r}: must be between 0 and 1")
        object.__setattr__(self, "options", Options(self.options))
        _ = self.policy  # checks its own options

    @property
    def policy(self) -> Policy:
        """The score as an object."""
        return POLICIES[self.score](**self.options)

    @property
    def keeps_moments(self) -> bool:
        """Whether evicted tokens must be summarised: for the correction or for the score."""
        return self.correction != "off" or self.score == "moment"

    @property
    def keeps_scatter(self) -> bool:
        """Whether the summary includes the value-key covariance."""
        return self.correction == "first" or self.score == "moment"

    @property
    def keeps_variance(self) -> bool:
        """Whether the summary includes Cov(k,k)."""
        return self.correction != "off" and self.mass == "variance"

    @property
    def adaptive(self) -> bool:
        """Whether heads of a layer may get different budgets."""
        return self.allocation in ("adaptive", "adaptive-floor")

    @property
    def wider_while_decoding(self) -> int:
        """Tokens that decoding protects beyond those that a prefill does."""
        return 0 if self.recent_share is not None else max(0, (self.decode_window or 0) - self.window)

    @property
    def least_budget(self) -> int:
        """The smallest budget in tokens: sinks and window are kept, and `interval` tokens must be left to evict."""
        window = 0 if self.recent_share is not None else self.window
        return self.sinks + window + self.wider_while_decoding + self.interval
