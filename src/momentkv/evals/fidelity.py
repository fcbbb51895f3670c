"""Measure fidelity: teacher-forced distributions and attention outputs, compressed against full cache."""

from typing import Any

import torch
from torch import Tensor

from momentkv.evals.caches import Held, compress_all
from momentkv.evals.generation import step
from momentkv.evals.output_error import exact_output, output_error
from momentkv.evals.tasks.fidelity import Passage
from momentkv.evals.variants import Variant
from momentkv.hf.attention import attend
from momentkv.hf.cache import MomentCache
from momentkv.hf.follow import Follow, follow
from momentkv.hf.layer import MomentLayer
from momentkv.hf.prefill import prefill
from momentkv.hf.rows import RowsCache

NEAR, FAR = 128, (512, 1024)  # tokens after the prompt that the metrics, and those named `_far`, are taken over


def _round(x: Any, digits: int = 6) -> Any:
    return [_round(y, digits) for y in x] if isinstance(x, list) else float(f"{x:.{digits}g}")


def attention_values(variant: Variant, cache: MomentCache, after: Follow, truth: list[Any], prompt: int) -> dict:
    """Means over layers, query heads and queries, and tables `[layer][query head]`, of the attention output's error.

    Empty for the full cache. worse_share: share of (layer, head, query) whose corrected output is farther from the
    truth than with the same exact tokens and no correction.
    """
    settings = variant.settings
    if settings is None or not after.layers:
        return {}
    heads, projected, joint, worse = [], [], [], []
    for (index, e), full, weight in zip(after.layers, truth, after.projections, strict=True):
        layer = cache.layers[index]
        assert isinstance(layer, MomentLayer) and layer.state is not None
        error = output_error(layer.state, settings, e, full, prompt, weight)
        heads.append(error.corrected.flatten(0, 1).mean(-1))
        worse.append((error.corrected > error.plain * (1 + 1e-6)).float().mean())
        if error.projected is not None and error.joint is not None:
            projected.append(error.projected.flatten(0, 1).mean(-1))
            joint.append(error.joint.mean())
    values: dict[str, Any] = {
        "error": _round(torch.stack(heads).mean().item()),
        "worse_share": _round(torch.stack(worse).mean().item()),
        "error_by_head": _round(torch.stack(heads).tolist(), 4),
    }
    if joint:
        values["error_projected"] = _round(torch.stack(joint).mean().item())
        values["error_projected_by_head"] = _round(torch.stack(projected).tolist(), 4)
    return values


def _distribution_values(kl: Tensor, nll: Tensor, same: Tensor) -> dict[str, float]:
    """From figures per token `[f]`."""
    near = slice(0, NEAR)
    values = {
        "kl": kl[near].mean(),
        "kl_median": kl[near].median(),
        "kl_p90": kl[near].quantile(0.9),
        "nll": nll[near].mean(),
        "top1": same[near].mean(),
    }
    if len(kl) >= FAR[1]:
        far = slice(*FAR)
        values |= {"kl_far": kl[far].mean(), "kl_median_far": kl[far].median(), "top1_far": same[far].mean()}
    return {name: _round(x.item()) for name, x in values.items()}


def _follow_rows(model: Any, caches: list[MomentCache], ids: Tensor, logits: Tensor, tick: Any) -> list[Tensor]:
    """Per-token KL, NLL and agreement of every cache with the full one, `[caches, f]` each, fed token by token.

    Args:
        ids: the continuation, `[f]`. logits: of the full cache, for each of its tokens `[f, vocabulary]`.
    """
    rows = RowsCache(caches)
    order = torch.tensor(rows.order, device=ids.device).argsort()
    kl, nll, same = (torch.zeros(len(caches), len(ids)) for _ in range(3))
    found = logits[:1].expand(len(caches), -1)
    for i, token in enumerate(ids):
        truth, mine = logits[i].float().log_softmax(-1), found.float().log_softmax(-1)[order]
        kl[:, i] = (truth.exp() * (truth - mine)).sum(-1).clamp(min=0).cpu()
        nll[:, i] = -mine[:, token].cpu()
        same[:, i] = (mine.argmax(-1) == truth.argmax()).float().cpu()
        if i + 1 < len(ids):
            found = step(model, rows, token.expand(len(caches), 1))
        tick(i + 1, len(ids))
    return [kl, nll, same]


@torch.no_grad()
def measure(
    model: Any, passage: Passage, variants: list[Variant], mass: bool, tick: Any = lambda i, n: None
) -> tuple[list[Held], list[dict[str, Any]]]:
    """What each variant holds, and its figures, for one passage.

    The reference is one pass of exact attention over the continuation; the compressed caches read it token by token
    and evict as they go. Attention errors are of the state right after the prompt.
    """
    ids = torch.tensor(passage.token_ids, device=model.device)
    before, rest = ids[: passage.prompt], ids[passage.prompt :]
    with attend(model):
        exact = prefill(model, before.unsqueeze(0), mass=mass)
        after = follow(model, exact, rest.unsqueeze(0))
    caches, held = compress_all(exact, variants, len(rest) + 1)
    truth = [exact_output(e) for _, e in after.layers]
    values = [
        attention_values(v, cache, after, truth, passage.prompt) for v, cache in zip(variants, caches, strict=True)
    ]
    logits = torch.cat([exact.logits, after.logits[:-1]])
    del exact, truth, after
    with attend(model):
        figures = _follow_rows(model, caches, rest, logits, tick)
    for i, mine in enumerate(values):
        mine.update(_distribution_values(*(x[i] for x in figures)))
    return held, values
