"""Oracles: what the library should do, said again token by token in fp64 with plain loops.

One row of a batch at a time, one list of tokens per KV head, in order of position. `a` is a scaled query. Rules are
read from `s`, any object with the fields of `Settings`. Nothing here comes from the library.
"""

import math
from dataclasses import dataclass
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

Scores = list[dict[int, float]]  # per head, by position


class Token(NamedTuple):
    position: int
    k: Tensor
    v: Tensor


class Summary(NamedTuple):
    """Moments of a list of tokens, straight from their definitions."""

    count: int
    mean_k: Tensor
    mean_v: Tensor
    scatter_vk: Tensor
    scatter_kk: Tensor


@dataclass
class Row:
    """One row of a batch in one layer. budget: tokens each head may hold. mass: attention received so far."""

    kept: list[list[Token]]
    evicted: list[list[Token]]
    mass: Scores
    budget: list[int]
    seen: int = 0

    @classmethod
    def empty(cls, heads: int, tokens: int) -> "Row":
        return cls([[] for _ in range(heads)], [[] for _ in range(heads)], [{} for _ in range(heads)], [tokens] * heads)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Add tokens `[h, n, d]`, `[h, n, d_v]`."""
        for h, (k, v) in enumerate(zip(keys.double(), values.double(), strict=True)):
            self.kept[h] += [Token(self.seen + i, k[i], v[i]) for i in range(len(k))]
            self.mass[h] |= {self.seen + i: 0.0 for i in range(len(k))}
        self.seen += keys.shape[1]

    def positions(self) -> list[list[int]]:
        return [[t.position for t in head] for head in self.kept]

    def evict(self, head: int, gone: set[int]) -> None:
        self.evicted[head] += [t for t in self.kept[head] if t.position in gone]
        self.kept[head] = [t for t in self.kept[head] if t.position not in gone]


def logits(a: Tensor, tokens: list[Token], at: float = math.inf) -> list[float]:
    """`a . k` of every token, `-inf` for those after position `at`."""
    dots = (torch.stack([t.k for t in tokens]) @ a.double()).tolist()
    return [x if t.position <= at else -math.inf for x, t in zip(dots, tokens, strict=True)]


def softmax(x: list[float]) -> list[float]:
    """Softmax of logits; zeros where all are `-inf`."""
    top = max(x)
    powers = [math.exp(y - top) if y > -math.inf else 0.0 for y in x]
    return [p / max(sum(powers), 1e-300) for p in powers]


def state(a: Tensor, tokens: list[Token]) -> tuple[Tensor, float]:
    """Output and log-normaliser of one query over a non-empty list of tokens."""
    x = logits(a, tokens)
    out = sum(w * t.v for w, t in zip(softmax(x), tokens, strict=True))
    return torch.as_tensor(out), max(x) + math.log(sum(math.exp(y - max(x)) for y in x))


def summarise(tokens: list[Token], d: int, dv: int) -> Summary:
    if not tokens:
        empty = torch.zeros(dv + d, d, dtype=torch.float64)
        return Summary(0, empty[0], empty.new_zeros(dv), empty[:dv], empty[dv:])
    k, v = torch.stack([t.k for t in tokens]), torch.stack([t.v for t in tokens])
    dk, dv_ = k - k.sum(0) / len(k), v - v.sum(0) / len(v)
    return Summary(len(k), k.sum(0) / len(k), v.sum(0) / len(v), dv_.T @ dk, dk.T @ dk)


def corrected(a: Tensor, kept: list[Token], m: Summary, s: Any) -> Tensor:
    """Exact attention over the kept tokens and the estimate of the evicted ones, with bare exponentials."""
    a = a.double()
    powers = [math.exp(x) for x in logits(a, kept)]
    z, total = sum(powers), torch.tensor(powers, dtype=torch.float64) @ torch.stack([t.v for t in kept])
    if s.correction == "off" or m.count == 0:
        return total / z
    mass = m.count * math.exp(float(a @ m.mean_k))
    if s.mass == "variance":
        mass *= 1 + float(a @ m.scatter_kk @ a) / m.count / 2
    value = m.mean_v + (m.scatter_vk @ a / m.count if s.correction == "first" else 0)
    return (total + mass * value) / (z + mass)


def residual(t: Token, m: Summary, scaling: float, centred: bool) -> float:
    """Norm of what the summary does not say about a token (Eq. 11)."""
    if m.count == 0:
        return float(t.v.norm())
    k = t.k - m.mean_k if centred else t.k
    return float((t.v - m.mean_v - m.scatter_vk @ k * scaling / m.count).norm())


def received(a: Tensor, at: list[int], tokens: list[Token]) -> dict[int, float]:
    """Attention each token receives from queries `[g, w, d]`: summed over the window, mean over the group."""
    got = {t.position: 0.0 for t in tokens}
    for group in a:
        for query, position in zip(group, at, strict=True):
            for t, w in zip(tokens, softmax(logits(query, tokens, position)), strict=True):
                got[t.position] += w / len(a)
    return got


def pooled(attention: dict[int, float], first: int, kernel: int, kind: str) -> dict[int, float]:
    """SnapKV's pooling: neighbours in the list, among the tokens before the window, zeros beyond the ends."""
    before = [p for p in sorted(attention) if p < first]
    out = dict(attention)
    for i, p in enumerate(before):
        near = [attention[before[j]] for j in range(max(0, i - kernel // 2), min(len(before), i + kernel // 2 + 1))]
        out[p] = max(near) if kind == "max" else sum(near) / kernel
    return out


def score(s: Any, row: Row, a: Tensor, at: list[int], scaling: float, decoding: bool) -> Scores:
    """Worth of each held token by the definition of `s.score`; queries `[h, g, w, d]` at positions `at`."""
    if s.score == "streaming":
        return [{t.position: float(t.position) for t in head} for head in row.kept]
    if s.score == "knorm":
        return [{t.position: -float(t.k.norm()) for t in head} for head in row.kept]
    if s.score == "keydiff":
        means = [sum(t.k / t.k.norm() for t in head) for head in row.kept]
        cosine = torch.nn.functional.cosine_similarity
        return [
            {t.position: -float(cosine(t.k, m, dim=0)) for t in head} for head, m in zip(row.kept, means, strict=True)
        ]
    if s.score == "h2o":
        age = {t.position: (row.seen - t.position if s.options.get("mean") else 1) for head in row.kept for t in head}
        return [
            {t.position: row.mass[h][t.position] / age[t.position] for t in head} for h, head in enumerate(row.kept)
        ]
    if s.score == "tova":
        heads = [received(a[h, :, -1:], at[-1:], head) for h, head in enumerate(row.kept)]
        if s.allocation.startswith("adaptive"):
            return heads
        return [{p: fmean(other[p] for other in heads) for p in heads[0]}] * len(heads)
    attention = [received(a[h], at, head) for h, head in enumerate(row.kept)]
    if s.score == "snapkv" and not decoding:
        kernel, kind = s.options.get("kernel", 7), s.options.get("pool", "avg")
        return [pooled(x, at[0], kernel, kind) for x in attention]
    return attention


def moment_scores(
    s: Any, attention: Scores, kept: list[list[Token]], gone: list[list[Token]], scaling: float
) -> Scores:
    """Attention times the norm of the residual (Eq. 12)."""
    out = []
    for alpha, head, evicted in zip(attention, kept, gone, strict=True):
        m = summarise(evicted, len(head[0].k), len(head[0].v))
        centred = s.options.get("residual", "centred") == "centred"
        out.append({t.position: alpha[t.position] * residual(t, m, scaling, centred) for t in head})
    return out


def largest_remainder(x: list[float]) -> list[int]:
    """Round to integers without changing the (integral) sum; ties go to the earlier."""
    x = [round(y, 9) for y in x]
    whole = [math.floor(y) for y in x]
    order = sorted(range(len(x)), key=lambda i: -round(x[i] - whole[i], 9))
    for i in order[: round(sum(x)) - sum(whole)]:
        whole[i] += 1
    return whole


def pyramid(tokens: int, window: int, layers: int) -> list[float]:
    """PyramidKV's budgets per layer before rounding, by its own formulas."""
    least = (tokens - window) // 20
    most = 2 * (tokens - window) - least
    return [most - i * (most - least) / (layers - 1) + window for i in range(layers)]


def head_budgets(s: Any, judged: Scores, shielded: list[int], total: int) -> list[int]:
    """How many tokens each head of a layer may hold; `judged` are the tokens that compete."""
    heads = len(judged)
    if not s.allocation.startswith("adaptive"):
        return [total // heads] * heads
    room = total - sum(shielded)
    entries = []
    for h, scores in enumerate(judged):
        safe = int(s.alpha * total / heads) - shielded[h] if s.allocation == "adaptive-floor" else 0
        best = sorted(scores, key=lambda p: -scores[p])
        entries += [(-math.inf if best.index(p) < safe else -scores[p], h) for p in scores]
    winners = [h for _, h in sorted(entries)[:room]]
    share = [float(winners.count(h)) for h in range(heads)]
    if s.allocation == "adaptive":
        share = [(1 - s.alpha) * x + s.alpha * room / heads for x in share]
    has = [len(scores) for scores in judged]  # what a head cannot use goes to the others, by what they have left
    spare = [max(0.0, n - x) for n, x in zip(has, share, strict=True)]
    share = [min(n, x) for n, x in zip(has, share, strict=True)]
    lack = max(0.0, room - sum(share)) / max(1e-9, sum(spare))
    share = [x + y * min(1.0, lack) for x, y in zip(share, spare, strict=True)]
    return [n + x for n, x in zip(shielded, largest_remainder(share), strict=True)]


def in_blocks(free: list[int], place: dict[int, int], block: int) -> list[list[int]]:
    """The free positions by aligned block of their place in the list of candidates."""
    blocks: dict[int, list[int]] = {}
    for p in free:
        blocks.setdefault(place[p] // block, []).append(p)
    return list(blocks.values())


def choose(scores: dict[int, float], blocks: list[list[int]], room: int) -> set[int]:
    """Whole blocks by mean score while they fit (blocks of one: none), then the best single tokens."""
    chosen: set[int] = set()
    for b in sorted(blocks, key=lambda b: -fmean(scores[p] for p in b)):
        if len(chosen) + len(b) > room:
            break
        chosen |= set(b)
    rest = sorted((p for b in blocks for p in b if p not in chosen), key=lambda p: -scores[p])
    return chosen | set(rest[: room - len(chosen)])


def window_of(s: Any, tokens: int, decoding: bool) -> int:
    """How many of the newest tokens are never evicted."""
    if s.recent_share is not None:
        return max(1, min(int(tokens * s.recent_share), tokens - s.sinks - s.interval))
    return s.decode_window if decoding and s.decode_window is not None else s.window


def add_mass(s: Any, row: Row, a: Tensor, at: list[int]) -> None:
    if s.score == "h2o":
        for h, head in enumerate(row.kept):
            for p, w in received(a[h], at, head).items():
                row.mass[h][p] += w


def compress(s: Any, row: Row, a: Tensor, at: list[int], scaling: float, tokens: int) -> None:
    """Evict from a row with a new prompt or chunk down to `tokens` per head; `a` are the window's queries."""
    if all(len(head) <= budget for head, budget in zip(row.kept, row.budget, strict=True)):
        return
    attention = score(s, row, a, at, scaling, False)
    place = [{t.position: i for i, t in enumerate(head)} for head in row.kept]
    total, target = sum(map(len, row.kept)), tokens * len(row.kept)
    rounds = s.rounds if s.score == "moment" else 1
    newest = row.seen - window_of(s, tokens, False)
    for i in range(1, rounds + 1):
        scores = attention
        if s.score == "moment":
            scores = moment_scores(s, attention, row.kept, row.evicted, scaling)
        free = [[t.position for t in head if s.sinks <= t.position < newest] for head in row.kept]
        blocks = [in_blocks(f, where, s.block) for f, where in zip(free, place, strict=True)]
        judged = [{p: fmean(x[q] for q in b) for b in bs for p in b} for x, bs in zip(scores, blocks, strict=True)]
        shielded = [len(head) - len(f) for head, f in zip(row.kept, free, strict=True)]
        row.budget = head_budgets(s, judged, shielded, total - (total - target) * i // rounds)
        for h, (x, bs) in enumerate(zip(scores, blocks, strict=True)):
            row.evict(h, set(free[h]) - choose(x, bs, row.budget[h] - shielded[h]))


def step(s: Any, row: Row, a: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    """Algorithm 1: append, evict `interval` tokens of a head over its budget, attend. `a`: `[h, g, d]`."""
    row.append(k.unsqueeze(1), v.unsqueeze(1))
    query, at = a.unsqueeze(2), [row.seen - 1]
    add_mass(s, row, query, at)
    scores = score(s, row, query, at, scaling, True)
    if s.score == "moment":
        scores = moment_scores(s, scores, row.kept, row.evicted, scaling)
    newest = row.seen - window_of(s, sum(row.budget) // len(row.budget), True)
    for h, head in enumerate(row.kept):
        if len(head) > row.budget[h]:
            free = [t.position for t in head if s.sinks <= t.position < newest]
            row.evict(h, set(sorted(free, key=scores[h].__getitem__)[: s.interval]))
    parts = [(a[h], row.kept[h], summarise(row.evicted[h], k.shape[-1], v.shape[-1])) for h in range(len(a))]
    return torch.stack([torch.stack([corrected(q, kept, m, s) for q in group]) for group, kept, m in parts])
