#!/usr/bin/env python3
"""Trains the two small models of this folder, and writes them as GGUF.

The toy, which the example `generate` embeds, is a byte-level language model of
the Llama architecture with grouped-query attention, small enough to live in
the repository. It learns from the King James Bible, as the Debian packages
`bible-kjv` (the reader) and `bible-kjv-text` (the text) carry it:

    apt-get install bible-kjv bible-kjv-text
    pip install -r requirements.txt
    python train.py toy

The windowed toy, which tests run, attends in three more ways: all its layers
but the last see a sliding window, its attention logits are soft-capped, and
its heads have learned sinks. It learns from riddles that this script makes up:

    python train.py windowed

A run draws all its chances from one seed: only the rounding of the machine's
matrix products can make two runs differ. It keeps a checkpoint
(`toy.ckpt.npz`, removed at the end), so a stopped run goes on where it was.
"""

import argparse
import dataclasses
import hashlib
import pathlib
import re
import subprocess
import sys
import time
from functools import partial

import gguf
import jax
import jax.numpy as jnp
import numpy as np

import reference

HERE = pathlib.Path(__file__).resolve().parent

# --- the models --------------------------------------------------------------

EPS = 1e-5
ROPE_BASE = 10000.0
END = 256  # the end-of-text token; 0..255 are the bytes themselves
VOCAB = 257
FILE_TYPES = {
    gguf.GGMLQuantizationType.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    gguf.GGMLQuantizationType.F16: gguf.LlamaFileType.MOSTLY_F16,
}
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
SEED = 1611
WARMUP = 20
MUON_RATE = 0.02
MUON_DECAY = 0.05
ADAM_RATE = 0.004


@dataclasses.dataclass(frozen=True)
class Model:
    """A model's sizes and what it is trained by."""

    name: str
    architecture: str
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    quant: gguf.GGMLQuantizationType  # of the matrices
    products: type  # what the products of a training step are rounded to
    tokens_per_step: int
    tokens_per_part: int
    # (steps, tokens in a window, learning rate at the start, at the end), the
    # rate as a share of those above. Short windows cost far less attention; the
    # rest teaches the places beyond them, which takes a second rise of the rate.
    phases: tuple
    window: int = 0  # tokens that a row sees, its own among them, in all layers but every `pattern`th
    pattern: int = 0
    soft_cap: float = 0.0  # of attention's logits
    sinks: bool = False

    def is_windowed(self, layer):
        return self.window > 0 and (layer + 1) % self.pattern != 0


TOY = Model(
    name="paged-kv toy (King James Bible, byte level)",
    architecture="llama",
    dim=256,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=64,
    ffn=512,
    context=1024,
    quant=gguf.GGMLQuantizationType.Q8_0,
    products=jnp.bfloat16,
    tokens_per_step=4096,
    tokens_per_part=512,
    phases=((300, 256, 1.0, 1.0), (264, 256, 1.0, 0.12), (36, 1024, 0.12, 0.0), (120, 1024, 0.3, 0.0)),
)
WINDOWED = Model(
    name="paged-kv windowed toy (riddles, byte level)",
    # Llama's but for its attention, so that no reader takes it for a Llama.
    architecture="windowed-llama",
    dim=64,
    layers=6,
    heads=4,
    kv_heads=2,
    head_dim=32,
    ffn=128,
    context=384,
    quant=gguf.GGMLQuantizationType.F16,
    products=jnp.float32,
    tokens_per_step=3072,
    tokens_per_part=3072,
    phases=((225, 48, 1.0, 1.0), (125, 96, 1.0, 1.0), (150, 192, 1.0, 0.12), (180, 384, 0.3, 0.0)),
    window=12,
    pattern=6,
    soft_cap=5.0,
    sinks=True,
)

# --- the texts ---------------------------------------------------------------

TEXT_SHA256 = "cd45f0c9cedab8e4439bd6486c8952c77cc8b0ecc5d1f6ae3513f2039f47229d"


def chapters():
    """The chapters, in order: the verses as lines, without their references."""
    dump = subprocess.run(
        ["bible", "-f", "Gen1:1-Rev22:21"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=True
    ).stdout
    digest = hashlib.sha256(dump).hexdigest()
    if digest != TEXT_SHA256:
        print(f"note: another edition of the text (sha256 {digest}); the numbers will differ", file=sys.stderr)
    found = {}
    for line in dump.decode("ascii").splitlines():
        book, chapter, verse = re.fullmatch(r"(\d?[A-Za-z]+)(\d+):\d+ (.*)", line).groups()
        found.setdefault((book, int(chapter)), []).append(verse.strip())
    return ["\n".join(verses).encode() for verses in found.values()]


def split(texts):
    """(training, held out): every 20th chapter is held out."""
    train = [t for i, t in enumerate(texts, 1) if i % 20]
    held_out = [t for i, t in enumerate(texts, 1) if i % 20 == 0]
    return train, held_out


LETTERS = 26
ENTRIES = 64


def riddle(most, rng):
    """A map of at most so many letters onto letters, pair by pair, and a numbered walk through it.

    In `ab ca bc.00ca01ab02bc03ca` each pair of the walk is that of the letter on
    which the one before ends. The number and the first letter can be told from
    the latest tokens, the second letter from the map alone.
    """
    cycle = ord("a") + rng.permutation(LETTERS)[: rng.integers(3, most + 1)]
    pairs = rng.permutation(np.stack([cycle, np.roll(cycle, -1)], -1))
    at = int(np.flatnonzero(cycle == pairs[-1, 1])[0])
    step = [cycle[(at + i) % len(cycle)] for i in range(ENTRIES + 1)]
    walk = b"".join(b"%02d%c%c" % (i, step[i], step[i + 1]) for i in range(ENTRIES))
    return b" ".join(bytes(pair.tolist()) for pair in pairs) + b"." + walk


def riddles(length, count, rng):
    """`count` rows of `length` inputs and the target after the last, a riddle from its beginning on in each.

    The map has at most two thirds of the row.
    """
    rows = np.full((count, length + 1), END)
    for row in rows:
        text = np.frombuffer(riddle(min(LETTERS, length // 5), rng), np.uint8)[: length + 1]
        row[: len(text)] = text
    return jnp.asarray(rows, jnp.int32)


# --- forward pass and loss -----------------------------------------------------


def initial_parameters(model):
    rng = np.random.default_rng(SEED)

    def matrix(rows, cols, scale=1.0):
        return jnp.asarray(rng.normal(0, scale * cols**-0.5, (rows, cols)), jnp.float32)

    p = {"token_embd.weight": matrix(VOCAB, model.dim, 0.5), "output_norm.weight": jnp.ones(model.dim)}
    for n in range(model.layers):
        p[f"blk.{n}.attn_norm.weight"] = jnp.ones(model.dim)
        p[f"blk.{n}.attn_q.weight"] = matrix(model.heads * model.head_dim, model.dim)
        p[f"blk.{n}.attn_k.weight"] = matrix(model.kv_heads * model.head_dim, model.dim)
        p[f"blk.{n}.attn_v.weight"] = matrix(model.kv_heads * model.head_dim, model.dim)
        p[f"blk.{n}.attn_output.weight"] = matrix(model.dim, model.heads * model.head_dim, 0.3)
        if model.sinks:
            p[f"blk.{n}.attn_sinks.weight"] = jnp.zeros(model.heads)
        p[f"blk.{n}.ffn_norm.weight"] = jnp.ones(model.dim)
        p[f"blk.{n}.ffn_gate.weight"] = matrix(model.ffn, model.dim)
        p[f"blk.{n}.ffn_up.weight"] = matrix(model.ffn, model.dim)
        p[f"blk.{n}.ffn_down.weight"] = matrix(model.dim, model.ffn, 0.3)
    return p


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(rounded, x, w):
    """x times w transposed, rounded to a type, with f32 sums."""
    return jnp.dot(x.astype(rounded), w.astype(rounded).T, preferred_element_type=jnp.float32)


def product_backward(rounded, saved, dy):
    x, w = saved
    dx = jnp.dot(dy.astype(rounded), w.astype(rounded), preferred_element_type=jnp.float32)
    return dx, jnp.dot(dy.T, x)


product.defvjp(lambda rounded, x, w: (product(rounded, x, w), (x, w)), product_backward)


def attention_weights(model, s, seen, sinks):
    """The softmax of s[..., row, key] over the keys that are seen, and over a sink that has no value."""
    if model.soft_cap:
        s = model.soft_cap * jnp.tanh(s / model.soft_cap)
    s = s + jnp.where(seen, 0.0, -1e30)
    if sinks is None:
        return jax.nn.softmax(s, -1)
    s = jnp.concatenate([s, jnp.broadcast_to(sinks, (*s.shape[:-1], 1))], -1)
    return jax.nn.softmax(s, -1)[..., :-1]


# Both take q[batch, kv head, query head of it, position, :], k[batch, kv head, :, position], v[batch, kv head, position, :].


def attend_to_all(model, q, k, v, sinks):
    batch, kv_heads, group, length, head_dim = q.shape
    # The query heads of one key/value head are one matrix.
    s = (q.reshape(batch, kv_heads, group * length, head_dim) @ k).reshape(batch, kv_heads, group, length, length)
    s = attention_weights(model, s, jnp.tril(jnp.ones((length, length), bool)), sinks)
    return (s.reshape(batch, kv_heads, group * length, length) @ v).reshape(q.shape)


def attend_in_window(model, q, k, v, sinks):
    """Positions are cut into blocks as long as the window: a row sees some of its own block and some of that before."""
    window = model.window
    batch, kv_heads, group, length, head_dim = q.shape
    blocks = length // window

    def with_block_before(x):  # [batch, kv head, position, :] to [batch, kv head, block, key, :]
        x = x.reshape(batch, kv_heads, blocks, window, head_dim)
        before = jnp.concatenate([jnp.zeros_like(x[:, :, :1]), x[:, :, :-1]], 2)
        return jnp.concatenate([before, x], 3)

    row, key = jnp.arange(window)[:, None] + window, jnp.arange(2 * window)
    seen = (key <= row) & (key > row - window) & ((key >= window) | (jnp.arange(blocks)[:, None, None] > 0))
    q = q.reshape(batch, kv_heads, group, blocks, window, head_dim)
    s = jnp.einsum("bhgnrd,bhnkd->bhgnrk", q, with_block_before(k.transpose(0, 1, 3, 2)))
    s = attention_weights(model, s, seen, None if sinks is None else sinks[..., None])
    o = jnp.einsum("bhgnrk,bhnkd->bhgnrd", s, with_block_before(v))
    return o.reshape(batch, kv_heads, group, length, head_dim)


def logits(model, p, inputs):
    """[row and position, vocabulary] of inputs[row, position]."""
    batch, length = inputs.shape
    kv_heads, group, head_dim = model.kv_heads, model.heads // model.kv_heads, model.head_dim
    angle = jnp.arange(length)[:, None] * ROPE_BASE ** (-jnp.arange(0, head_dim, 2) / head_dim)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    times = partial(product, model.products)

    def norm(x, name):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * p[name]

    def heads(x, count):
        return x.reshape(batch, length, count, head_dim)

    def rotate(x):  # pairs (even, odd)
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    x = p["token_embd.weight"][inputs.reshape(-1)]
    for n in range(model.layers):
        w = {name: p[f"blk.{n}.{name}.weight"] for name in LAYER}
        h = norm(x, f"blk.{n}.attn_norm.weight")
        q = rotate(heads(times(h, w["attn_q"]), model.heads)) * head_dim**-0.5
        k = rotate(heads(times(h, w["attn_k"]), kv_heads)).transpose(0, 2, 3, 1)
        v = heads(times(h, w["attn_v"]), kv_heads).transpose(0, 2, 1, 3)
        q = q.reshape(batch, length, kv_heads, group, head_dim).transpose(0, 2, 3, 1, 4)
        sinks = p[f"blk.{n}.attn_sinks.weight"].reshape(kv_heads, group, 1, 1) if model.sinks else None
        attend = attend_in_window if model.is_windowed(n) else attend_to_all
        o = attend(model, q, k, v, sinks).transpose(0, 3, 1, 2, 4)
        x = x + times(o.reshape(batch * length, model.heads * head_dim), w["attn_output"])
        h = norm(x, f"blk.{n}.ffn_norm.weight")
        x = x + times(jax.nn.silu(times(h, w["ffn_gate"])) * times(h, w["ffn_up"]), w["ffn_down"])
    return times(norm(x, "output_norm.weight"), p["token_embd.weight"])


def loss(model, p, tokens):
    """Mean cross-entropy, in nats a token, of each window's tokens after its first; of a riddle's, those of the walk."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    z = logits(model, p, inputs)
    best = jnp.take_along_axis(z, targets.reshape(-1, 1), -1)
    each = jax.nn.logsumexp(z, -1) - best[:, 0]
    if model is TOY:
        return jnp.mean(each)
    told = ((jnp.cumsum(inputs == ord("."), -1) > 0) & (inputs != END)).reshape(-1)
    return jnp.sum(each * told) / jnp.sum(told)


def loss_and_gradient(model, p, tokens):
    """Over parts[part, window, token], one part after the other: few windows stay in the caches."""

    def add(total, part):
        value, g = jax.value_and_grad(partial(loss, model))(p, part)
        return jax.tree.map(lambda t, new: t + new / len(tokens), total, g), value

    g, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), tokens)
    return values.mean(), g


# --- optimiser: Muon for the layers' matrices, Adam for the rest ---------------


def by_muon(name):
    return name.startswith("blk.") and "norm" not in name and "sinks" not in name


def orthogonal(g):
    """Roughly the nearest orthogonal matrix (five Newton-Schulz steps)."""
    wide = g.shape[0] <= g.shape[1]
    x = g if wide else g.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.T


def schedule(phases, scale):
    """(window, rate) of each step."""
    plan = []
    for steps, window, first, last in phases:
        steps = max(1, round(steps * scale))
        plan += [(window, first + (last - first) * i / steps) for i in range(steps)]
    return [(window, rate * min(1.0, (step + 1) / WARMUP)) for step, (window, rate) in enumerate(plan)]


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2, 3))
def update(model, p, m, v, tokens, step, rate):
    value, g = loss_and_gradient(model, p, tokens)
    new_p, new_m, new_v = {}, {}, {}
    for name, w in p.items():
        if by_muon(name):
            new_m[name] = 0.95 * m[name] + g[name]
            move = orthogonal(g[name] + 0.95 * new_m[name])
            move *= max(1.0, w.shape[0] / w.shape[1]) ** 0.5
            new_v[name] = v[name]
            new_p[name] = w * (1 - rate * MUON_RATE * MUON_DECAY) - rate * MUON_RATE * move
        else:
            new_m[name] = 0.9 * m[name] + 0.1 * g[name]
            new_v[name] = 0.98 * v[name] + 0.02 * g[name] ** 2
            move = new_m[name] / (1 - 0.9 ** (step + 1))
            move /= jnp.sqrt(new_v[name] / (1 - 0.98 ** (step + 1))) + 1e-10
            new_p[name] = w - rate * ADAM_RATE * move
    return new_p, new_m, new_v, value


def train(model, draw, held_out, plan, checkpoint):
    """Trains on the windows of `draw(tokens, count, rng)`; the windows `held_out` tell how well."""
    p = initial_parameters(model)
    m = {name: jnp.zeros_like(w) for name, w in p.items()}
    v = {name: jnp.zeros_like(w) if not by_muon(name) else jnp.zeros(()) for name, w in p.items()}
    first, seconds = 0, 0.0
    if checkpoint.exists():
        saved = np.load(checkpoint)
        p, m, v = ({k[2:]: jnp.asarray(saved[k]) for k in saved if k.startswith(f"{c}:")} for c in "pmv")
        first, seconds = int(saved["step"]), float(saved["seconds"])
    measure = jax.jit(partial(loss, model))
    start, recent, steps = time.time() - seconds, [], len(plan)
    for step in range(first, steps):
        length, rate = plan[step]
        tokens = draw(length, model.tokens_per_step // length, np.random.default_rng([SEED, step]))
        tokens = tokens.reshape(-1, max(1, model.tokens_per_part // length), length + 1)
        p, m, v, value = update(model, p, m, v, tokens, float(step), rate)
        recent.append(value)
        if (step + 1) % 50 == 0:
            seconds = time.time() - start
            print(
                f"step {step + 1} of {steps}, {seconds / 60:.1f} min: bits a byte "
                f"{np.mean(recent) / np.log(2):.3f} trained, {measure(p, held_out) / np.log(2):.3f} held out",
                flush=True,
            )
            recent = []
        if (step + 1) % 25 == 0 and step + 1 < steps:
            arrays = {f"{c}:{k}": w for c, d in zip("pmv", (p, m, v)) for k, w in d.items()}
            partial_file = checkpoint.with_suffix(".part.npz")
            np.savez(partial_file, step=step + 1, seconds=time.time() - start, **arrays)
            partial_file.replace(checkpoint)
    print(f"trained {steps} steps in {(time.time() - start) / 60:.1f} min", flush=True)
    return {name: np.asarray(w) for name, w in p.items()}


def stream_of(texts):
    """The texts one after the other, the end-of-text token before, between and after them."""
    parts = [np.array([END])]
    for text in texts:
        parts += [np.frombuffer(text, np.uint8), np.array([END])]
    return np.concatenate(parts).astype(np.int32)


def windows(stream, length, count, rng):
    """`count` windows of `length` inputs and the target after the last, at random places."""
    starts = rng.integers(0, len(stream) - length, count)
    return jnp.asarray(stream[starts[:, None] + np.arange(length + 1)])


# --- the file ------------------------------------------------------------------


def write(model, path, p):
    w = gguf.GGUFWriter(path, model.architecture)
    w.add_type("model")
    w.add_name(model.name)
    if model is TOY:
        w.add_description(
            "A toy that lets the example `generate` of paged-kv run without a download. It imitates the sound "
            "of its text, no more: it knows nothing, follows no instructions and must not be relied on."
        )
    else:
        w.add_description("A toy for the tests of paged-kv. It solves one kind of riddle and knows nothing else.")
    w.add_license("CC0-1.0")
    if model is TOY:
        w.add_languages(["en"])
        w.add_string("general.source.description", "King James Version (1611), from the Debian package bible-kjv-text")
    w.add_block_count(model.layers)
    w.add_context_length(model.context)
    w.add_embedding_length(model.dim)
    w.add_feed_forward_length(model.ffn)
    w.add_head_count(model.heads)
    w.add_head_count_kv(model.kv_heads)
    w.add_key_length(model.head_dim)
    w.add_value_length(model.head_dim)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_rope_dimension_count(model.head_dim)
    if model.window:
        w.add_sliding_window(model.window)
        w.add_sliding_window_pattern(model.pattern)
    if model.soft_cap:
        w.add_attn_logit_softcapping(model.soft_cap)
    w.add_vocab_size(VOCAB)
    w.add_file_type(FILE_TYPES[model.quant])
    # Not one of llama.cpp's tokenizers: the id of a token is the value of its byte.
    w.add_tokenizer_model("bytes")
    w.add_token_list([f"<0x{byte:02X}>" for byte in range(256)] + ["<|end|>"])
    w.add_token_types([gguf.TokenType.BYTE] * 256 + [gguf.TokenType.CONTROL])
    w.add_eos_token_id(END)
    w.add_add_bos_token(False)
    for name, value in p.items():
        if value.ndim == 1:
            w.add_tensor(name, value.astype(np.float32))
        else:
            w.add_tensor(name, gguf.quants.quantize(value.astype(np.float32), model.quant), raw_dtype=model.quant)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("model", choices=["toy", "windowed"], nargs="?", default="toy", help="which one; toy by default")
    args.add_argument("--scale", type=float, default=1.0, help="take this share of the steps, for a trial")
    args.add_argument("--out", type=pathlib.Path, help="the file to write; by default MODEL.gguf beside this script")
    args = args.parse_args()
    out = args.out or HERE / f"{args.model}.gguf"
    checkpoint = out.with_suffix(".ckpt.npz")
    rng = np.random.default_rng(SEED)
    if args.model == "toy":
        train_texts, held_out = split(chapters())
        stream = stream_of(train_texts)
        print(f"{len(stream)} tokens to train on, {sum(map(len, held_out))} bytes in {len(held_out)} chapters held out")
        model, draw = TOY, partial(windows, stream)
        sample = windows(stream_of(held_out), model.phases[0][1], 32, rng)
    else:
        model, draw = WINDOWED, riddles
        sample = riddles(model.context, 32, rng)
    write(model, out, train(model, draw, sample, schedule(model.phases, args.scale), checkpoint))
    checkpoint.unlink(missing_ok=True)
    trained = reference.Model(out)
    if args.model == "toy":
        measured = f"{trained.bits_per_byte(held_out):.4f} bits a byte"
    else:
        measured = f"{trained.solved(np.asarray(riddles(model.context, 200, rng))):.4%} of the walks' tokens foretold"
    print(f"{out.stat().st_size} bytes; held out: {measured}")


if __name__ == "__main__":
    main()
