"""One compression of a prompt, or of chunk after chunk, against the same thing written with loops."""

import pytest
import torch

import oracles
from momentkv import METHODS, Chunk, candidates, compress, settings_for

B, H, G, D, DV = 2, 2, 3, 5, 4
SCALING = D**-0.5
NAMED = [name for name, m in METHODS.items() if m.settings is not None and name != "random"]
EVERY = NAMED + [f"{name}:{preset}" for name in NAMED for preset in METHODS[name].presets]


def draw(n, seed=0):
    """Keys, values and scaled queries of `n` tokens; the first head's keys are larger, so its attention is sharper."""
    g = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(B, H, n, x, generator=g, dtype=torch.float64) for x in (D, DV))
    k[:, 0] *= 2
    return k, v, torch.randn(B, H, G, n, D, generator=g, dtype=torch.float64) * SCALING


def small(name, **options):
    """The method with a window that suits prompts of a few dozen tokens."""
    window = min(settings_for(name).window, 5)
    return settings_for(name, **{"window": window, **options})


def grow(s, tokens, k, v, a, old=None, valid=None):
    """The state after one more chunk."""
    seen = torch.zeros(len(k), dtype=torch.int32) if old is None else old.seen
    chunk = Chunk.of(k, v, a, seen, valid)
    tokens = torch.as_tensor(tokens).expand(len(k))
    return compress(candidates(chunk, s, SCALING, old), s, tokens, seen + chunk.real, old)


def grow_oracle(s, tokens, k, v, a, row):
    """The oracle row after one more chunk `[h, n, d]`."""
    row.append(k, v)
    at = list(range(row.seen - k.shape[1], row.seen))
    oracles.add_mass(s, row, a, at)
    oracles.compress(s, row, a[:, :, -s.window :], at[-s.window :], SCALING, tokens)
    return row


def assert_same(s, state, b, row):
    """Kept tokens, their keys and values, head budgets and moments of row `b`."""
    positions, keys, values = (state.dense(x)[b] for x in (state.positions, state.keys, state.values))
    m = state.moments(s)
    for h, head in enumerate(row.kept):
        real = positions[h] >= 0
        assert positions[h][real].tolist() == [t.position for t in head]  # in order
        assert torch.equal(keys[h][real], torch.stack([t.k for t in head]))
        assert torch.equal(values[h][real], torch.stack([t.v for t in head]))
        o = oracles.summarise(row.evicted[h], D, DV)
        for name in ("count", "mean_k", "mean_v", "scatter_vk", "scatter_kk"):
            if s.keeps_moments and (x := getattr(m, name)) is not None:
                torch.testing.assert_close(x[b, h], torch.as_tensor(getattr(o, name)).double(), msg=name)
    assert state.capacity[b].tolist() == [n + 1 for n in row.budget]
    assert state.seen[b] == row.seen


def run_both(s, tokens, chunks, seed=0):
    """Chunks of the given lengths through both, compared after each."""
    k, v, a = draw(sum(chunks), seed)
    state, rows, start = None, [oracles.Row.empty(H, tokens) for _ in range(B)], 0
    for n in chunks:
        part = slice(start, start + n)
        state = grow(s, tokens, k[:, :, part], v[:, :, part], a[:, :, :, part], state)
        for b, row in enumerate(rows):
            grow_oracle(s, tokens, k[b, :, part], v[b, :, part], a[b, :, :, part], row)
            assert_same(s, state, b, row)
        start += n
    return state, rows


@pytest.mark.parametrize("name", EVERY)
def test_every_method_and_preset(name):
    run_both(small(name), 14, [32])


@pytest.mark.parametrize("pool", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 11])
def test_pooling(pool, kernel):
    run_both(small("snapkv", pool=pool, kernel=kernel), 16, [40], seed=1)


@pytest.mark.parametrize("allocation", ["uniform", "adaptive", "adaptive-floor"])
@pytest.mark.parametrize("alpha", [0.15, 0.5, 1.0])
def test_head_budgets(allocation, alpha):
    _, rows = run_both(small("adakv", allocation=allocation, alpha=alpha), 17, [40], seed=2)
    assert all(sum(row.budget) == 17 * H for row in rows)
    if allocation == "adaptive" and alpha < 0.5:
        assert rows[0].budget[0] != rows[0].budget[1]  # the case is one where heads differ


@pytest.mark.parametrize("name", ["tova", "h2o"])
def test_other_scores_with_adaptive_heads(name):
    _, rows = run_both(small(name, allocation="adaptive", alpha=0.1), 17, [40, 6], seed=2)
    assert rows[0].budget[0] != rows[0].budget[1]


@pytest.mark.parametrize("name", ["snapkv", "adakv", "knorm", "momentkv:paper"])
@pytest.mark.parametrize("block", [2, 4, 7])
def test_blocks(name, block):
    run_both(small(name, block=block, alpha=0.23), 15, [37], seed=3)


@pytest.mark.parametrize("allocation", ["uniform", "adaptive"])
@pytest.mark.parametrize("rounds", [1, 3, 30])
@pytest.mark.parametrize("residual", ["centred", "uncentred"])
def test_rounds(allocation, rounds, residual):
    run_both(small("momentkv:paper", allocation=allocation, rounds=rounds, residual=residual), 15, [36], seed=4)


@pytest.mark.parametrize("name", ["streaming", "h2o", "h2o:kvpress", "tova", "keydiff", "adakv", "momentkv:paper"])
@pytest.mark.parametrize("chunks", [[24, 16], [6, 6, 6, 6, 9], [30, 1, 2]])
def test_chunks(name, chunks):
    run_both(small(name, alpha=0.23), 13, chunks, seed=5)


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("n", [1, 3, 14])
def test_prompts_that_fit_are_left_alone(name, n):
    state, rows = run_both(small(name), 14, [n])
    assert state.lengths().tolist() == [[n] * H] * B
    assert not any(gone for row in rows for gone in row.evicted)


@pytest.mark.parametrize("name", ["h2o", "tova", "snapkv", "adakv", "momentkv:paper"])
@pytest.mark.parametrize(("tokens", "lengths"), [([13, 13], [40, 21]), ([13, 13], [40, 9]), ([18, 13], [40, 26])])
def test_padded_rows_of_different_length_equal_each_row_alone(name, tokens, lengths):
    s, (k, v, a) = small(name), draw(40, seed=6)
    for side in ("left", "right"):
        valid = torch.zeros(B, 40, dtype=torch.bool)
        for b, n in enumerate(lengths):
            valid[b, 40 - n :] = side == "left"
            valid[b, :n] |= side == "right"
        state = grow(s, torch.tensor(tokens), k, v, a, valid=valid)
        for b in range(B):
            one = [x[b][..., valid[b], :] for x in (k, v, a)]
            row = grow_oracle(s, tokens[b], *one, oracles.Row.empty(H, tokens[b]))
            assert_same(s, state, b, row)
            assert_same(s, state.map(lambda x, b=b: x[b : b + 1]), 0, row)  # the row cut out of the batch


@pytest.mark.parametrize("name", ["h2o", "adakv", "momentkv:paper"])
def test_rows_that_stop_early_in_chunked_prefill(name):
    s, (k, v, a) = small(name, alpha=0.3), draw(40, seed=15)
    valid = torch.ones(B, 40, dtype=torch.bool)
    valid[1, 25:] = False  # its last chunk is empty: nothing of it may change
    state, rows = None, [oracles.Row.empty(H, 18) for _ in range(B)]
    for part in (slice(0, 20), slice(20, 30), slice(30, 40)):
        state = grow(s, 18, k[:, :, part], v[:, :, part], a[:, :, :, part], state, valid[:, part])
        for b, row in enumerate(rows):
            x = [t[b][..., part, :][..., valid[b, part], :] for t in (k, v, a)]
            if x[0].shape[1]:
                grow_oracle(s, 18, *x, row)
            assert_same(s, state, b, row)
    assert name != "adakv" or abs(rows[1].budget[0] - rows[1].budget[1]) > 3
