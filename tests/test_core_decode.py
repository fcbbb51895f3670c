"""Decoding, step by step against Algorithm 1 written with loops."""

import pytest
import torch

import oracles
from momentkv import Chunk, Settings, candidates, compress, decode, settings_for

B, H, G, D, DV = 2, 2, 3, 5, 4
SCALING = D**-0.5
SMALL = {"window": 3, "sinks": 1}
METHODS = ["streaming", "h2o", "h2o:kvpress", "tova", "snapkv", "pyramidkv", "adakv", "knorm", "keydiff", "momentkv"]


def draw(n, batch=B, seed=0, dtype=torch.float64):
    """Keys, values and scaled queries of `n` tokens; the first head's keys are larger, so its attention is sharper."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(batch, H, n, x, generator=g, dtype=torch.float64) for x in (D, DV))
    a = torch.randn(batch, H, G, n, D, generator=g, dtype=torch.float64) * SCALING
    k[:, 0] *= 2
    return k.to(dtype), v.to(dtype), a.to(dtype)


def start(s, tokens, k, v, a, valid=None):
    chunk = Chunk.of(k, v, a, torch.zeros(len(k), dtype=torch.int32), valid)
    e = candidates(chunk, s, SCALING)
    return compress(e, s, torch.full((len(k),), tokens), chunk.real)


def start_oracle(s, tokens, k, v, a):
    """Oracle row of one unpadded prompt `[h, n, d]`."""
    row = oracles.Row.empty(H, tokens)
    row.append(k, v)
    at = list(range(k.shape[1]))
    oracles.add_mass(s, row, a, at)
    oracles.compress(s, row, a[:, :, -s.window :], at[-s.window :], SCALING, tokens)
    return row


def advance(state, s, k, v, a, t, real=None):
    real = torch.ones(len(k), dtype=torch.bool) if real is None else real
    return decode(state, s, a[:, :, :, t : t + 1], k[:, :, t], v[:, :, t], real, SCALING)


def held(state, b):
    """Positions held by each head of row `b`, sorted."""
    return [sorted(p for p in head if p >= 0) for head in state.dense(state.positions)[b].tolist()]


def assert_same(state, rows, s, out=None, expected=None):
    for b, row in enumerate(rows):
        assert held(state, b) == row.positions()
        if out is not None:
            torch.testing.assert_close(out[b, :, :, 0], expected[b], rtol=1e-9, atol=1e-9)
        if not s.keeps_moments:
            continue
        m = state.moments(s)
        for h, gone in enumerate(row.evicted):
            o = oracles.summarise(gone, D, DV)
            for name in ("count", "mean_k", "mean_v", "scatter_vk", "scatter_kk"):
                if (x := getattr(m, name)) is not None:
                    torch.testing.assert_close(
                        x[b, h], torch.as_tensor(getattr(o, name)).double(), rtol=1e-9, atol=1e-9
                    )


def run_both(s, tokens, prompt, steps, seed=0):
    k, v, a = draw(prompt + steps, seed=seed)
    state = start(s, tokens, k[:, :, :prompt], v[:, :, :prompt], a[:, :, :, :prompt])
    rows = [start_oracle(s, tokens, k[b, :, :prompt], v[b, :, :prompt], a[b, :, :, :prompt]) for b in range(B)]
    assert_same(state, rows, s)
    for t in range(prompt, prompt + steps):
        out = advance(state, s, k, v, a, t).out
        expected = [oracles.step(s, row, a[b, :, :, t], k[b, :, t], v[b, :, t], SCALING) for b, row in enumerate(rows)]
        assert_same(state, rows, s, out, expected)
        assert int(state.lengths().sum(-1).max()) <= H * tokens  # the budget is a ceiling, slack counted


@pytest.mark.parametrize("allocation", ["uniform", "adaptive", "adaptive-floor"])
@pytest.mark.parametrize("interval", [1, 4])
def test_paper_is_algorithm_1(allocation, interval):
    s = settings_for("momentkv", "paper", window=3, allocation=allocation, interval=interval)
    run_both(s, 13, 24, 36)


@pytest.mark.parametrize("options", [{"residual": "uncentred"}, {"mass": "variance"}, {"correction": "zeroth"}])
def test_paper_variants(options):
    run_both(settings_for("momentkv", "paper", window=3, **options), 9, 12, 30, seed=1)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("method", METHODS)
def test_every_method_evicts_as_defined(method, interval):
    s = settings_for(method, **{**SMALL, "decoding": "evict", "interval": interval})
    run_both(s, 12, 20, 20, seed=2)


@pytest.mark.parametrize("interval", [1, 4])
@pytest.mark.parametrize("method", ["h2o", "adakv", "momentkv:paper"])
def test_chunks_between_steps(method, interval):
    """A later chunk, as in a second turn: it may fit into the slack of an interval, or not."""
    s = settings_for(method, **SMALL, interval=interval, alpha=0.5)  # so that the least budget of a head never decides
    k, v, a = draw(52, seed=7)
    state = start(s, 12, k[:, :, :24], v[:, :, :24], a[:, :, :, :24])
    rows = [start_oracle(s, 12, k[b, :, :24], v[b, :, :24], a[b, :, :, :24]) for b in range(B)]
    t = 24
    for n in (1, 2, 1, 1, 9, 1, 3, 1, 1, 1, 2, 1, 4):
        if n == 1:
            advance(state, s, k, v, a, t)
        else:
            chunk = Chunk.of(*(x[..., t : t + n, :] for x in (k, v, a)), state.seen, None)
            state = compress(candidates(chunk, s, SCALING, state), s, torch.full((B,), 12), state.seen + n, state)
        for b, row in enumerate(rows):
            parts = k[b, :, t : t + n], v[b, :, t : t + n], a[b, :, :, t : t + n]
            if n == 1:
                oracles.step(s, row, parts[2][:, :, 0], parts[0][:, 0], parts[1][:, 0], SCALING)
            else:
                row.append(*parts[:2])
                at = list(range(t, t + n))
                oracles.add_mass(s, row, parts[2], at)
                oracles.compress(s, row, parts[2][:, :, -s.window :], at[-s.window :], SCALING, 12)
            assert state.capacity[b].tolist() == [x + 1 for x in row.budget]
        assert_same(state, rows, s)
        t += n


@pytest.mark.parametrize("method", ["h2o", "tova", "momentkv:paper"])
def test_prompt_shorter_than_the_budget_fills_it_first(method):
    run_both(settings_for(method, **SMALL), 12, 5, 20, seed=3)


@pytest.mark.parametrize("method", ["h2o", "snapkv", "momentkv", "momentkv:paper"])
@pytest.mark.parametrize("short", [20, 7, 2])
def test_left_padded_row_equals_the_row_alone(method, short):
    s = settings_for(method, **SMALL)
    k, v, a = draw(40)
    valid = torch.ones(B, 24, dtype=torch.bool)
    valid[1, : 24 - short] = False
    state = start(s, 10, k[:, :, :24], v[:, :, :24], a[:, :, :, :24], valid)
    k1, v1, a1 = (x[1:, ..., 24 - short :, :] for x in (k, v, a))
    alone = start(s, 10, k1[:, :, :short], v1[:, :, :short], a1[:, :, :, :short])
    for t in range(12):
        together = advance(state, s, k, v, a, 24 + t)
        single = advance(alone, s, k1, v1, a1, short + t)
        assert held(state, 1) == held(alone, 0)
        torch.testing.assert_close(together.out[1], single.out[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("method", ["h2o", "adakv", "momentkv:paper"])
def test_padding_while_decoding_changes_nothing(method, interval):
    s = settings_for(method, **SMALL, interval=interval)
    k, v, a = draw(44, seed=4)
    state = start(s, 10, k[:, :, :20], v[:, :, :20], a[:, :, :, :20])
    alone = start(s, 10, k[1:, :, :20], v[1:, :, :20], a[1:, :, :, :20])
    for t in range(20, 44):
        real = t % 3 != 0
        before = held(state, 1)
        advance(state, s, k, v, a, t, torch.tensor([True, real]))
        if real:
            advance(alone, s, k[1:], v[1:], a[1:], t)
        else:
            assert held(state, 1) == before
        assert held(state, 1) == held(alone, 0)
        assert state.seen[1] == alone.seen[0]
        if state.mass is not None:
            together, single = (x.dense(x.mass)[-1][x.dense(x.positions)[-1] >= 0] for x in (state, alone))
            torch.testing.assert_close(together, single)


@pytest.mark.parametrize("method", ["snapkv:original", "adakv:library", "streaming:one-shot", "h2o:kvcf"])
def test_grow_never_evicts_while_decoding(method):
    s = settings_for(method, window=3)
    k, v, a = draw(100)
    state = start(s, 10, k[:, :, :20], v[:, :, :20], a[:, :, :, :20])
    first = [held(state, b) for b in range(B)]
    for t in range(20, 100):
        out = advance(state, s, k, v, a, t).out
    for b in range(B):
        assert held(state, b) == [head + list(range(20, 100)) for head in first[b]]
        kept = torch.tensor(held(state, b)[1])
        expected, _ = oracles.state(a[b, 1, 2, t], [oracles.Token(int(p), k[b, 1, p], v[b, 1, p]) for p in kept])
        torch.testing.assert_close(out[b, 1, 2, 0], expected)


@pytest.mark.parametrize("method", ["tova", "knorm", "adakv", "h2o", "momentkv"])
@pytest.mark.parametrize("options", [{}, {"interval": 4}, {"decode_window": 5}, {"decode_window": 0}])
def test_sinks_and_window_survive(method, options):
    s = settings_for(method, sinks=2, window=3, **options)
    k, v, a = draw(60, seed=5)
    k[:, :, :2] *= 9  # the worst keys by norm
    state = start(s, s.least_budget + 1, k[:, :, :30], v[:, :, :30], a[:, :, :, :30])
    for t in range(30, 60):
        advance(state, s, k, v, a, t)
        recent = oracles.window_of(s, s.least_budget + 1, True)
        for head in held(state, 0) + held(state, 1):
            assert {0, 1, *range(max(t + 1 - recent, 27 if options.get("decode_window") else 0), t + 1)} <= set(head)


@pytest.mark.parametrize("alpha", [0.0, 0.2])
def test_window_that_is_wider_while_decoding(alpha):
    s = settings_for("adakv", sinks=1, window=2, decode_window=8, alpha=alpha)
    k, v, a = draw(60, seed=6)
    k[:, 0] *= 2
    state = start(s, s.least_budget, k[:, :, :40], v[:, :, :40], a[:, :, :, :40])
    for t in range(40, 60):
        advance(state, s, k, v, a, t)
        assert state.lengths().sum(-1).tolist() == [H * s.least_budget] * B
        for head in held(state, 0) + held(state, 1):
            assert {0, *range(max(38, t - 7), t + 1)} <= set(head)


def test_paper_may_evict_the_newest_token():
    s = settings_for("momentkv", "paper", window=3)
    k, v, a = draw(30)
    state = start(s, 8, k, v, a)
    decode(
        state,
        s,
        torch.zeros(B, H, G, 1, D),
        k[:, :, 0],
        torch.zeros(B, H, DV) + state.moments(s).mean_v,
        torch.ones(B, dtype=torch.bool),
        0.0,
    )
    assert all(30 not in head for b in range(B) for head in held(state, b))


def test_a_state_is_its_tensors():
    s = Settings(score="moment", correction="first", allocation="adaptive", **SMALL)
    k, v, a = draw(40)
    state = start(s, 10, k[:, :, :30], v[:, :, :30], a[:, :, :, :30])
    copy = state.map(torch.clone)
    for t in range(30, 40):
        x, y = advance(state, s, k, v, a, t), advance(copy, s, k, v, a, t)
        assert torch.equal(x.out, y.out)
