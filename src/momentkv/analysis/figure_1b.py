"""Figure 1b: the values of one head in a plane, and what a query gets from the retained and from the evicted ones."""

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from momentkv.analysis import draw
from momentkv.analysis.figures import model_name, one_budget, write_csv
from momentkv.analysis.plane import principal_plane
from momentkv.analysis.probe import Choice, Probe, Read, check_choices, parts, precise, probe
from momentkv.analysis.texts import passages_of
from momentkv.evals.attention_error import kept_mask
from momentkv.evals.output_error import exact_output
from momentkv.evals.run import progress
from momentkv.hf.cache import MomentCache
from momentkv.hf.layer import MomentLayer

# x, y: in the principal plane. along, across: of an output, along f_R and across it. value: a token's attention, an
# output's length, or the number that `what` names.
COLUMNS = ("what", "position", "set", "x", "y", "along", "across", "value")


@dataclass(frozen=True)
class Head:
    """One query of one query head, on the host in fp64. values: `[n, dv]` of the prompt; retained: `[n]`.
    attention: `[n]`, what the prompt's tokens get. outputs: `f_R`, `f_E` and `f` by name, `[dv]`."""

    values: Tensor
    retained: Tensor
    attention: Tensor
    outputs: dict[str, Tensor]


def candidates(model: Any, args: Namespace, choice: Choice) -> tuple[list[int], list[int]]:
    """The layers and query heads to choose from: those of `--layer` and `--head`, default all.

    Raises:
        ValueError: the model has no such layer (one that is compressed) or head.
    """
    layers = [layer.index for layer in MomentCache(model.config, choice.budget, choice.method).moment_layers]
    heads = list(range(model.config.get_text_config().num_attention_heads))
    for name, given, valid in (("layer", args.layer, layers), ("head", args.head, heads)):
        if given is not None and given not in valid:
            raise ValueError(f"--{name} {given} is none of this model's {len(valid)}: {valid[0]} to {valid[-1]}")
    return [args.layer] if args.layer is not None else layers, [args.head] if args.head is not None else heads


def typical(p: Probe, layers: Sequence[int], heads: Sequence[int]) -> tuple[int, int, int]:
    """Index of a layer, a query head and a query.

    Of the given heads the one whose cosine, averaged over its queries, is closest to the median over all heads of the
    model, and of its queries the one whose cosine is closest to that average.
    """
    cosine = p.cosine.flatten(1, 2)  # [layers, heads, q]
    mean = cosine.mean(-1)
    distance = (mean - mean.flatten().quantile(0.5)).abs()
    among = [(p.layers.index(layer), head) for layer in layers for head in heads]
    chosen = min(among, key=lambda at: distance[at].item())
    query = int((cosine[chosen] - mean[chosen]).abs().argmin())
    return p.layers[chosen[0]], chosen[1], query


def head_of(text: Read, choice: Choice, layer: int, head: int, query: int) -> Head:
    """What figure 1b shows of a layer, a query head and a query (their indices)."""
    e, tokens = precise(dict(text.after.layers)[layer]), text.exact.tokens
    own, inner = divmod(head, e.queries.shape[2])  # KV head, and query head in its group
    cached = text.exact.compress(choice.budget, choice.method).layers[layer]
    assert isinstance(cached, MomentLayer) and cached.state is not None
    full = exact_output(e)
    states = dict(zip(("f_R", "f_E"), parts(e, cached.state, tokens), strict=True)) | {"f": full}
    at = (0, own, inner, query)
    logits = e.keys[0, own, :tokens].to(e.queries.dtype) @ e.queries[at]
    return Head(
        e.values[0, own, :tokens].double().cpu(),
        kept_mask(cached.state, tokens)[0, own].cpu(),
        torch.exp(logits - full.lse[at]).double().cpu(),
        {name: state.out[at].double().cpu() for name, state in states.items()},
    )


def figure(model: Any, tokenizer: Any, args: Namespace) -> str:
    """Write figure-1b into `--out`; returns its caption."""
    choice = Choice("h2o", one_budget(args))
    check_choices(model, [choice])
    among = candidates(model, args, choice)
    passage = passages_of(args, tokenizer, 1)[0]
    with progress(1) as advance:
        text = passage.read(model)
        (found,) = probe(text, [choice])
        advance(passage.name)
    layer, head, query = typical(found, *among)
    shown = head_of(text, choice, layer, head, query)
    own = found.cosine.flatten(1, 2)[found.layers.index(layer), head]
    numbers = {
        "layer": layer,
        "head": head,
        "query": query,
        "cosine": float(own[query]),
        "angle": math.degrees(math.acos(max(-1.0, min(1.0, float(own[query]))))),
        "weight": float(found.weight.flatten(1, 2)[found.layers.index(layer), head, query]),
        "head_cosine": float(own.mean()),
        "median_cosine": float(found.cosine.mean(-1).flatten().quantile(0.5)),
    }
    asked = "of those asked for " if args.layer is not None or args.head is not None else ""
    caption = (
        f"{model_name(args)}, {choice.method}, L = {choice.budget} of N = {text.exact.tokens:,} tokens, "
        f"{passage.name}. (a), (b): values of layer {layer}, query head {head} (from 0), in the plane of their "
        "first two principal components (with their share of the variance), and what a query "
        f"{query + 1} tokens after the prompt gets from the retained, the evicted and all tokens. (c): these outputs "
        f"in their own plane, where angles and lengths are true. The head is {asked}the one whose mean cosine "
        f"({numbers['head_cosine']:.3f}) is closest to the median of {found.cosine[..., 0].numel()} heads "
        f"({numbers['median_cosine']:.3f}, {found.cosine.shape[-1]} queries each), the query the one closest to its "
        "head's mean."
    )
    _write(Path(args.out) / "figure-1b", shown, numbers, caption)
    return caption


def _own_plane(outputs: dict[str, Tensor]) -> dict[str, draw.Point]:
    """Coordinates of the outputs along `f_R` and across it. All three lie in one plane (Eq. 1), so nothing is lost."""
    along = outputs["f_R"] / outputs["f_R"].norm()
    across = outputs["f_E"] - (outputs["f_E"] @ along) * along
    across = across / across.norm().clamp(min=torch.finfo(across.dtype).tiny)
    return {name: (float(x @ along), float(x @ across)) for name, x in outputs.items()}


def _write(stem: Path, head: Head, numbers: dict[str, float], caption: str) -> None:
    plane = principal_plane(head.values)
    dots, zero = plane(head.values), _pair(plane(torch.zeros_like(plane.mean)))
    tips, own = {name: _pair(plane(x)) for name, x in head.outputs.items()}, _own_plane(head.outputs)
    rows: list[tuple[Any, ...]] = [
        ("token", i, "R" if kept else "E", *dots[i].tolist(), "", "", float(head.attention[i]))
        for i, kept in enumerate(head.retained.tolist())
    ]
    rows += [(name, "", "", *tips[name], *own[name], float(x.norm())) for name, x in head.outputs.items()]
    rows += [("zero", "", "", *zero, 0.0, 0.0, 0.0)]
    rows += [(name, *[""] * 6, value) for name, value in numbers.items()]
    write_csv(stem.with_name(f"{stem.name}.csv"), COLUMNS, rows)
    first, second = plane.explained.tolist()
    draw.head(
        stem,
        dots.numpy(),
        head.retained.numpy(),
        {f"${name}$": tip for name, tip in tips.items()},
        zero,
        (f"first principal component ({first:.0%})", f"second principal component ({second:.0%})"),
        {f"${name}$": tip for name, tip in own.items()},
        rf"$\angle(f_E, f_R)$ = {numbers['angle']:.0f}°, cosine {numbers['cosine']:.3f}, "
        rf"$w_E$ = {numbers['weight']:.2g}",
        caption,
    )


def _pair(x: Tensor) -> draw.Point:
    return float(x[0]), float(x[1])
