"""What eviction loses (docs/math.md, section 2), against brute force, on random states and on a real model."""

import math

import pytest
import torch

from conftest import build, prompt
from momentkv import settings_for
from momentkv.analysis import gaps as gaps_module
from momentkv.analysis.gaps import check_identities, gaps_of, residuals
from momentkv.analysis.plane import principal_plane
from momentkv.analysis.probe import QUANTITIES, Choice, Read, check_choices, parts, precise, probe, read
from momentkv.evals import attention_error
from momentkv.hf import attend as attend_model
from momentkv.hf import prefill
from momentkv.state import AttnState, attend, merge


def random_states(seed: int = 0, keep: float = 0.3, dtype=torch.float64):
    """Queries, keys and values, a random split of the tokens, and the states of both parts and the whole."""
    g = torch.Generator().manual_seed(seed)
    a = torch.randn(2, 3, 2, 5, 8, generator=g, dtype=dtype)
    k, v = (torch.randn(2, 3, 40, 8, generator=g, dtype=dtype) for _ in range(2))
    kept = torch.rand(2, 3, 40, generator=g) < keep
    masks = [m[:, :, None, None, :] for m in (kept, ~kept, torch.ones_like(kept))]
    return a, k, v, kept, [attend(a, k, v, mask) for mask in masks]


def by_hand(a, k, v, kept) -> dict[str, torch.Tensor]:
    """Explicit softmax over sets, one query at a time."""
    found = {name: torch.empty(a.shape[:-1], dtype=a.dtype) for name in ("weight", "cosine", "gamma", "error")}
    for at in torch.cartesian_prod(*(torch.arange(n) for n in a.shape[:-1])).tolist():
        b, h, g, q = at
        weights = [math.exp(float(a[b, h, g, q] @ key)) for key in k[b, h]]

        def mean_of(tokens, b=b, h=h, weights=weights):
            return sum(weights[i] * v[b, h, i] for i in tokens) / sum(weights[i] for i in tokens)

        r, e = ([i for i in range(len(weights)) if bool(kept[b, h, i]) == side] for side in (True, False))
        f_r, f_e, f = mean_of(r), mean_of(e), mean_of(range(len(weights)))
        found["weight"][b, h, g, q] = sum(weights[i] for i in e) / sum(weights)
        found["cosine"][b, h, g, q] = f_e @ f_r / (f_e.norm() * f_r.norm())
        found["gamma"][b, h, g, q] = (f_e - f_r).norm() / f.norm()
        found["error"][b, h, g, q] = (f - f_r).norm() / f.norm()
    return found


@pytest.mark.parametrize("seed", range(3))
def test_gaps_are_what_explicit_softmax_over_sets_gives(seed):
    a, k, v, kept, states = random_states(seed)
    found = gaps_of(*states)
    for name, truth in by_hand(a, k, v, kept).items():
        torch.testing.assert_close(getattr(found, name), truth, rtol=1e-9, atol=1e-12, msg=name)


@pytest.mark.parametrize("keep", [0.05, 0.5, 0.9])
def test_the_identities_hold_for_random_states(keep):
    *_, states = random_states(1, keep)
    assert residuals(*states).max() < 1e-9
    g = gaps_of(*states)
    f_r, f_e, f = (s.out for s in states)
    torch.testing.assert_close(f - f_r, g.weight.unsqueeze(-1) * (f_e - f_r), rtol=1e-9, atol=1e-12)
    sine = (1 - g.cosine**2).sqrt()
    squared = (f_e.norm(dim=-1) * g.cosine - f_r.norm(dim=-1)) ** 2 + (f_e.norm(dim=-1) * sine) ** 2
    torch.testing.assert_close((f - f_r).norm(dim=-1) ** 2, g.weight**2 * squared, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(g.parallel**2 + g.across**2, g.error**2, rtol=1e-9, atol=1e-15)
    assert (g.parallel < 0).any() and (g.across >= 0).all()


def test_fp32_states_hold_too():
    *_, states = random_states(2, dtype=torch.float32)
    assert 0 < check_identities(*states, "here") < 1e-4


def test_states_that_are_no_partition_are_found():
    a, k, v, kept, (retained, evicted, full) = random_states(3)
    twice = kept.clone()
    twice[..., 0] = True
    with_both = attend(a, k, v, twice[:, :, None, None, :])
    with pytest.raises(FloatingPointError, match=r"layer 7: the identity \(2\).*at most 0.0001"):
        check_identities(with_both, evicted, full, "layer 7")
    with pytest.raises(FloatingPointError, match="nan"):
        check_identities(retained, AttnState(evicted.out * torch.nan, evicted.lse), full, "here")
    check_identities(retained, evicted, merge(retained, evicted), "here")


def test_an_error_that_is_all_rounding_is_no_breach(monkeypatch):
    """Evicted tokens of no weight: the loss has no digits left, and is measured against the output's own rounding."""
    a, k, v, kept, (retained, _, _) = random_states(4)
    evicted = attend(a, k, v, ~kept[:, :, None, None, :])
    evicted = AttnState(evicted.out, evicted.lse - 34)
    full = merge(retained, evicted)
    noisy = AttnState(full.out * (1 + 1e-15), full.lse)
    check_identities(retained, evicted, noisy, "here")
    monkeypatch.setattr(gaps_module, "RESOLUTION", 0)
    with pytest.raises(FloatingPointError):
        check_identities(retained, evicted, noisy, "here")


def test_where_everything_is_retained_nothing_is_lost():
    *_, states = random_states(5, keep=1.1)
    g = gaps_of(*states)
    assert all((getattr(g, name) == 0).all() for name in ("weight", "cosine", "error", "parallel", "across"))
    assert g.gamma.isfinite().all()
    assert check_identities(*states, "here") == 0


def test_the_plane_is_that_of_the_singular_value_decomposition():
    x = torch.randn(60, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64) @ torch.diag(
        torch.tensor([3.0, 0.2, 2.0, 1.0, 0.5, 0.4, 0.1], dtype=torch.float64)
    ) + torch.arange(7)
    plane = principal_plane(x)
    torch.testing.assert_close(plane.axes @ plane.axes.T, torch.eye(2, dtype=torch.float64))
    u, s, vh = torch.linalg.svd(x - x.mean(0), full_matrices=False)
    torch.testing.assert_close(plane(x) @ plane.axes, u[:, :2] * s[:2] @ vh[:2])
    torch.testing.assert_close(plane.explained, s[:2] ** 2 / (s**2).sum())
    assert (principal_plane(x.flip(0)).axes - plane.axes).abs().max() < 1e-9  # the same way round
    alone = principal_plane(torch.ones(1, 3))
    assert (alone.explained == 0).all() and alone(torch.ones(3)).abs().max() == 0
    with pytest.raises(ValueError, match=r"two dimensions, not \[5, 1\]"):
        principal_plane(torch.ones(5, 1))


@pytest.fixture(scope="module")
def text() -> Read:
    ids = prompt(1, 132)[0].tolist()
    return read(build("llama"), ids[:120], ids[120:])


@pytest.mark.parametrize("method", ["snapkv", "adakv", "momentkv", "momentkv:paper"])
def test_a_probe_agrees_with_the_attention_error_of_the_whole_text(text, method):
    """The same loss from one prefill over prompt and continuation, by other code."""
    (found,) = probe(text, [Choice(method, "50")])
    whole = prefill(build("llama"), prompt(1, 132), window=100)
    pairs = {"error": "plain", "corrected": "corrected", "weight": "evicted_weight", "cosine": "cosine"}
    for i, e in enumerate(whole.layers):
        other = attention_error(e, 120, settings_for(method), 50)
        for mine, theirs in pairs.items():
            torch.testing.assert_close(
                getattr(found, mine)[i].float(),
                getattr(other, theirs)[0],
                rtol=1e-3,
                atol=1e-4,
                msg=f"{mine}, layer {i}",
            )
        if found.estimate_cosine.any():
            torch.testing.assert_close(found.estimate_cosine[i].float(), other.cosine_estimate[0], rtol=1e-3, atol=1e-4)
    assert (found.estimate_cosine != 0).all() == method.startswith("momentkv")


def test_h2os_loss_from_the_tokens_its_cache_holds(text):
    """Retained are exactly the tokens of the cache and those after the prompt, by explicit softmax."""
    (found,) = probe(text, [Choice("h2o", "40")])
    cache = text.exact.compress(40, "h2o")
    assert found.layers == (0, 1, 2) and found.tokens == cache.report().tokens_per_head == 40
    for i, e in text.after.layers:
        state = cache.layers[i].state
        positions = state.dense(state.positions)
        for query in (0, 11):
            n = 121 + query
            kept = torch.zeros(1, 2, n, dtype=torch.bool)
            kept[..., 120:] = True
            for head in range(2):
                held = positions[0, head][positions[0, head] >= 0].long()
                kept[0, head, held] = True
            a = e.queries[..., query : query + 1, :].double()
            truth = by_hand(a, e.keys[:, :, :n].double(), e.values[:, :, :n].double(), kept)
            for name, value in truth.items():
                torch.testing.assert_close(getattr(found, name)[i][..., query], value[0, ..., 0], rtol=1e-6, atol=1e-9)


def test_a_budget_that_holds_the_prompt_loses_nothing(text):
    for found in probe(text, [Choice("h2o", "200"), Choice("momentkv:paper", "200")]):
        for name in ("weight", "error", "corrected", "cosine", "estimate_cosine"):
            assert getattr(found, name).abs().max() < 1e-12, name
        assert all(getattr(found, name).isfinite().all() for name in QUANTITIES)


def test_impossible_choices_are_refused_before_anything_is_read():
    for choice, message in ((Choice("h2o", "2"), "least possible"), (Choice("snapvk", "64"), "snapvk")):
        with pytest.raises(ValueError, match=message):
            check_choices(build("llama"), [choice])


def test_the_identities_hold_on_a_real_model(smollm2, reference_text):
    model, tokenizer = smollm2
    ids = tokenizer(reference_text[40_000:44_000])["input_ids"][:512]
    text = read(model, ids[:500], ids[500:])
    found = probe(text, [Choice("h2o", "64"), Choice("adakv", "64"), Choice("momentkv:paper", "64")])
    assert all(0 < p.residual <= 1e-4 for p in found)
    h2o, _, paper = found
    assert h2o.error.shape == (30, 3, 3, 12) and 0.01 < h2o.weight.mean() < 0.5
    torch.testing.assert_close(h2o.error, h2o.weight * h2o.gamma, rtol=1e-4, atol=1e-12)
    assert paper.corrected.mean() < paper.error.mean() and paper.estimate_cosine.mean() > 0.5


def test_in_the_models_own_precision_the_identities_hold_too(smollm2, reference_text):
    model, tokenizer = smollm2
    ids = tokenizer(reference_text[40_000:44_000])["input_ids"][:308]
    text = read(model, ids[:300], ids[300:])
    cache = text.exact.compress(64, "h2o")
    for i, e in text.after.layers:
        assert e.queries.dtype == torch.float32
        for evidence in (e, precise(e)):
            kept, lost = parts(evidence, cache.layers[i].state, 300)
            full = attend(evidence.queries, e.keys, e.values, _causal(e))
            check_identities(kept, lost, full, f"layer {i}")


def _causal(e):
    return (e.positions[:, :, None, None, :] <= e.query_positions[:, None, None, :, None]).contiguous()


def test_reading_leaves_the_model_as_it_was(tiny):
    before = tiny.config._attn_implementation
    read(tiny, prompt(1, 80)[0].tolist(), [5, 6], mass=False)
    assert tiny.config._attn_implementation == before
    with attend_model(tiny):
        assert tiny.config._attn_implementation != before
