"""Settings and methods: bad options are refused by name, presets and overrides arrive, and every combination runs."""

import dataclasses
import itertools
import subprocess
import sys
from typing import get_args

import pytest
import torch

from momentkv import METHODS, POLICIES, Chunk, Settings, candidates, compress, decode, settings_for
from momentkv.settings import Allocation, Correction, Decoding, Mass, Storage

CHOICES = {"allocation": Allocation, "correction": Correction, "mass": Mass, "moments": Storage, "decoding": Decoding}
BAD_NUMBERS = [
    *[
        (name, bad)
        for name in ("sinks", "window", "block", "rounds", "interval", "decode_window")
        for bad in (-1, 1.5, "2", True)
    ],
    *[(name, 0) for name in ("window", "block", "rounds", "interval")],
    *[(name, bad) for name in ("alpha", "recent_share") for bad in (-0.1, 1.1, float("nan"), "half")],
    *[("kernel", bad) for bad in (0, 4, -1)],
    ("alpha", None),
]


@pytest.mark.parametrize("name", ["score", *CHOICES])
@pytest.mark.parametrize("bad", ["bogus", None, 3])
def test_unknown_choices_are_quoted_and_valid_ones_named(name, bad):
    with pytest.raises(ValueError) as e:
        Settings(**{name: bad})
    assert name in str(e.value) and repr(bad) in str(e.value)
    for valid in get_args(CHOICES[name]) if name in CHOICES else POLICIES:
        assert valid in str(e.value)


@pytest.mark.parametrize(("name", "bad"), BAD_NUMBERS)
def test_bad_numbers_are_quoted(name, bad):
    with pytest.raises(ValueError) as e:
        settings_for("snapkv", **{name: bad})
    assert name in str(e.value) and repr(bad) in str(e.value)


WRONG_TYPES = """
from momentkv import settings_for
for method, name, bad in (
    ("snapkv", "kernel", 2.5), ("snapkv", "kernel", "7"),
    ("snapkv", "pool", "bogus"), ("momentkv:paper", "residual", "bogus"),
):
    try:
        settings_for(method, **{name: bad})
    except ValueError as e:
        print(name, e)
"""


def test_bad_policy_options_are_quoted_and_valid_ones_named():
    """In an interpreter of its own, where nothing checks annotations at run time."""
    run = subprocess.run([sys.executable, "-c", WRONG_TYPES], capture_output=True, text=True, check=True)
    lines = run.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["kernel", "kernel", "pool", "residual"]
    expected = (("2.5",), ("'7'",), ("'bogus'", "avg, max"), ("'bogus'", "centred, uncentred"))
    for line, words in zip(lines, expected, strict=True):
        assert all(word in line for word in words)


@pytest.mark.parametrize(
    ("call", "quoted", "valid"),
    [
        (lambda: settings_for("nothing"), "nothing", METHODS),
        (lambda: settings_for("snapkv", "bogus"), "bogus", METHODS["snapkv"].presets),
        (lambda: settings_for("snapkv:bogus"), "bogus", METHODS["snapkv"].presets),
        (lambda: settings_for("tova", "paper"), "paper", ["none"]),
        (lambda: settings_for("snapkv:original", "kvcf"), "original", ["kvcf"]),
        (lambda: settings_for("snapkv", windw=3), "windw", ["window", "kernel", "pool", "alpha"]),
        (lambda: settings_for("tova", kernel=5), "kernel", ["window", "sinks"]),
        (lambda: settings_for("snapkv", score="bogus"), "bogus", POLICIES),
        (lambda: settings_for("full", window=3), "window", ["full"]),
        (lambda: Settings(score="snapkv", options={"bogus": 1}), "bogus", ["kernel", "pool"]),
        (lambda: Settings(score="tova", options={"bogus": 1}), "bogus", ["none"]),
    ],
)
def test_unknown_names(call, quoted, valid):
    with pytest.raises(ValueError) as e:
        call()
    for word in (quoted, *valid):
        assert word in str(e.value)


def test_presets_and_overrides():
    assert settings_for("full") is None
    for name, method in METHODS.items():
        assert settings_for(name) == method.settings
        for preset, (about, changes) in method.presets.items():
            s = settings_for(name, preset)
            assert about and s == settings_for(f"{name}:{preset}") == settings_for(f"{name}:{preset}", preset)
            for field, value in changes.items():
                assert (getattr(s, field) if hasattr(s, field) else s.options[field]) == value
    s = settings_for("snapkv:original", kernel=3, window=9)
    assert (s.window, s.options, s.decoding, s.sinks) == (9, {"kernel": 3}, "grow", 0)
    assert s.policy.kernel == 3 and s.policy.pool == "avg"
    assert settings_for("adakv:original", kernel=3).options == {"pool": "max", "kernel": 3}
    assert settings_for("snapkv", options={"kernel": 3}).policy.kernel == 3
    other = settings_for("adakv:original", score="knorm")  # another score drops the first one's options
    assert other.options == {} and other.allocation == "adaptive"


def test_settings_cannot_change():
    s = settings_for("snapkv")
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.window = 3
    with pytest.raises(TypeError):
        s.options["kernel"] = 3
    assert hash(s) == hash(settings_for("snapkv"))


def run(s, dtype, batch=2, heads=2, groups=2, d=4, dv=3, n=16, steps=3, tokens=8):
    """A padded prompt and a few steps; the outputs and the final state."""
    g = torch.Generator().manual_seed(0)
    k, v, a = (torch.randn(batch, heads, *x, generator=g).to(dtype) for x in ((n, d), (n, dv), (groups, n, d)))
    valid = torch.ones(batch, n, dtype=torch.bool)
    valid[1, :3] = False
    chunk = Chunk.of(k, v, a, torch.zeros(batch, dtype=torch.int32), valid)
    state = compress(candidates(chunk, s, 0.5), s, torch.full((batch,), tokens), chunk.real)
    real = torch.ones(batch, dtype=torch.bool)
    return [decode(state, s, a[:, :, :, t : t + 1], k[:, :, t], v[:, :, t], real, 0.5) for t in range(steps)], state


AXES = [get_args(x) for x in (Allocation, Correction, Mass, Storage)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", POLICIES)
def test_every_combination_runs(score, dtype):
    decodings, blocks = itertools.cycle(get_args(Decoding)), itertools.cycle([1, 4, 3])
    for allocation, correction, mass, moments in itertools.product(*AXES):
        s = Settings(
            score,
            {},
            allocation,
            sinks=1,
            window=2,
            rounds=2,
            correction=correction,
            mass=mass,
            moments=moments,
            decoding=next(decodings),
            block=next(blocks),
        )
        outs, state = run(s, dtype, steps=2)
        assert all(torch.isfinite(x.out).all() and torch.isfinite(x.lse).all() for x in outs), s
        assert outs[0].out.shape == (2, 2, 2, 1, 3) and outs[0].out.dtype == torch.float32
        assert state.keys.dtype == state.values.dtype == dtype
        assert state.lengths().sum(-1).tolist() == [2 * 8 + (4 if s.decoding == "grow" else 0)] * 2, s
        assert bool(state.summary) == s.keeps_moments


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.settings])
def test_interval_recent_share_and_decode_window_mix_with_every_method(name):
    for interval, share, window in itertools.product([1, 3], [None, 0.0, 0.5, 1.0], [None, 0, 4]):
        s = settings_for(name, sinks=1, window=2, interval=interval, recent_share=share, decode_window=window)
        outs, state = run(s, torch.float32, steps=9, tokens=s.least_budget + 1)
        assert all(torch.isfinite(x.out).all() for x in outs)
        assert (state.lengths().sum(-1) <= 2 * (s.least_budget + 1)).all()
        positions = state.dense(state.positions)
        assert (positions == 0).any(-1).all()  # the sink
        assert (positions == state.seen.view(-1, 1, 1) - 1).any(-1).all() or window == 0
