#!/usr/bin/env python3
"""Trains the toy model that the example `generate` embeds, and writes it as GGUF.

The toy is a byte-level language model of the Llama architecture with
grouped-query attention, small enough to live in the repository. It learns
from the King James Bible, as the Debian packages `bible-kjv` (the reader) and
`bible-kjv-text` (the text) carry it:

    apt-get install bible-kjv bible-kjv-text
    pip install -r requirements.txt
    python train.py

The run draws all its chances from one seed: only the rounding of the machine's
matrix products can make two runs differ. It keeps a checkpoint
(`toy.ckpt.npz`, removed at the end), so a stopped run goes on where it was.
"""

import argparse
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

# --- the model ---------------------------------------------------------------

DIM = 256
LAYERS = 3
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 64
FFN = 512
EPS = 1e-5
ROPE_BASE = 10000.0
CONTEXT = 1024
END = 256  # the end-of-text token; 0..255 are the bytes themselves
VOCAB = 257
LAYER = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
QUANT = gguf.GGMLQuantizationType.Q8_0

# --- the training ------------------------------------------------------------

SEED = 1611
TOKENS_PER_STEP = 4096
TOKENS_PER_PART = 512
WARMUP = 20
# (steps, tokens in a window, learning rate at the start, at the end), the rate
# as a share of those below. Short windows cost far less attention; the rest
# teaches the places beyond them, which takes a second rise of the rate.
PHASES = (
    (300, 256, 1.0, 1.0),
    (264, 256, 1.0, 0.12),
    (36, CONTEXT, 0.12, 0.0),
    (120, CONTEXT, 0.3, 0.0),
)
MUON_RATE = 0.02
MUON_DECAY = 0.05
ADAM_RATE = 0.004

# --- the text ----------------------------------------------------------------

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


# --- forward pass and loss -----------------------------------------------------


def initial_parameters():
    rng = np.random.default_rng(SEED)

    def matrix(rows, cols, scale=1.0):
        return jnp.asarray(rng.normal(0, scale * cols**-0.5, (rows, cols)), jnp.float32)

    p = {"token_embd.weight": matrix(VOCAB, DIM, 0.5), "output_norm.weight": jnp.ones(DIM)}
    for n in range(LAYERS):
        p[f"blk.{n}.attn_norm.weight"] = jnp.ones(DIM)
        p[f"blk.{n}.attn_q.weight"] = matrix(HEADS * HEAD_DIM, DIM)
        p[f"blk.{n}.attn_k.weight"] = matrix(KV_HEADS * HEAD_DIM, DIM)
        p[f"blk.{n}.attn_v.weight"] = matrix(KV_HEADS * HEAD_DIM, DIM)
        p[f"blk.{n}.attn_output.weight"] = matrix(DIM, HEADS * HEAD_DIM, 0.3)
        p[f"blk.{n}.ffn_norm.weight"] = jnp.ones(DIM)
        p[f"blk.{n}.ffn_gate.weight"] = matrix(FFN, DIM)
        p[f"blk.{n}.ffn_up.weight"] = matrix(FFN, DIM)
        p[f"blk.{n}.ffn_down.weight"] = matrix(DIM, FFN, 0.3)
    return p


@jax.custom_vjp
def product(x, w):
    """x times w transposed, in bf16 with f32 sums."""
    return jnp.dot(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16).T, preferred_element_type=jnp.float32)


def product_backward(saved, dy):
    x, w = saved
    dx = jnp.dot(dy.astype(jnp.bfloat16), w.astype(jnp.bfloat16), preferred_element_type=jnp.float32)
    return dx, jnp.dot(dy.T, x)


product.defvjp(lambda x, w: (product(x, w), (x, w)), product_backward)


def loss(p, tokens):
    """Mean cross-entropy, in nats a token, of each window's tokens after its first."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    group = HEADS // KV_HEADS
    angle = jnp.arange(length)[:, None] * ROPE_BASE ** (-jnp.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    future = jnp.where(jnp.tril(jnp.ones((length, length), bool)), 0.0, -1e30)

    def norm(x, name):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + EPS) * p[name]

    def heads(x, count):
        return x.reshape(batch, length, count, HEAD_DIM)

    def rotate(x):  # pairs (even, odd)
        a, b = x[..., 0::2], x[..., 1::2]
        return jnp.stack([a * cos - b * sin, a * sin + b * cos], -1).reshape(x.shape)

    x = p["token_embd.weight"][inputs.reshape(-1)]
    for n in range(LAYERS):
        w = {name: p[f"blk.{n}.{name}.weight"] for name in LAYER}
        h = norm(x, f"blk.{n}.attn_norm.weight")
        q = rotate(heads(product(h, w["attn_q"]), HEADS)) * HEAD_DIM**-0.5
        k = rotate(heads(product(h, w["attn_k"]), KV_HEADS)).transpose(0, 2, 3, 1)
        v = heads(product(h, w["attn_v"]), KV_HEADS).transpose(0, 2, 1, 3)
        # The query heads of one key/value head are one matrix.
        q = q.reshape(batch, length, KV_HEADS, group, HEAD_DIM).transpose(0, 2, 3, 1, 4)
        s = (q.reshape(batch, KV_HEADS, group * length, HEAD_DIM) @ k).reshape(batch, KV_HEADS, group, length, length)
        s = jax.nn.softmax(s + future, -1).reshape(batch, KV_HEADS, group * length, length)
        o = (s @ v).reshape(batch, KV_HEADS, group, length, HEAD_DIM).transpose(0, 3, 1, 2, 4)
        x = x + product(o.reshape(batch * length, HEADS * HEAD_DIM), w["attn_output"])
        h = norm(x, f"blk.{n}.ffn_norm.weight")
        x = x + product(jax.nn.silu(product(h, w["ffn_gate"])) * product(h, w["ffn_up"]), w["ffn_down"])
    logits = product(norm(x, "output_norm.weight"), p["token_embd.weight"])
    best = jnp.take_along_axis(logits, targets.reshape(-1, 1), -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - best[:, 0])


def loss_and_gradient(p, tokens):
    """Over parts[part, window, token], one part after the other: few windows stay in the caches."""

    def add(total, part):
        value, g = jax.value_and_grad(loss)(p, part)
        return jax.tree.map(lambda t, new: t + new / len(tokens), total, g), value

    g, values = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), tokens)
    return values.mean(), g


# --- optimiser: Muon for the layers' matrices, Adam for the rest ---------------


def by_muon(name):
    return name.startswith("blk.") and "norm" not in name


def orthogonal(g):
    """Roughly the nearest orthogonal matrix (five Newton-Schulz steps)."""
    wide = g.shape[0] <= g.shape[1]
    x = g if wide else g.T
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x if wide else x.T


def schedule(scale):
    """(window, rate) of each step."""
    plan = []
    for steps, window, first, last in PHASES:
        steps = max(1, round(steps * scale))
        plan += [(window, first + (last - first) * i / steps) for i in range(steps)]
    return [(window, rate * min(1.0, (step + 1) / WARMUP)) for step, (window, rate) in enumerate(plan)]


@partial(jax.jit, donate_argnums=(0, 1, 2))
def update(p, m, v, tokens, step, rate):
    value, g = loss_and_gradient(p, tokens)
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


def train(stream, held_out, plan, checkpoint):
    p = initial_parameters()
    m = {name: jnp.zeros_like(w) for name, w in p.items()}
    v = {name: jnp.zeros_like(w) if not by_muon(name) else jnp.zeros(()) for name, w in p.items()}
    first, seconds = 0, 0.0
    if checkpoint.exists():
        saved = np.load(checkpoint)
        p, m, v = ({k[2:]: jnp.asarray(saved[k]) for k in saved if k.startswith(f"{c}:")} for c in "pmv")
        first, seconds = int(saved["step"]), float(saved["seconds"])
    measure = jax.jit(loss)
    sample = windows(held_out, PHASES[0][1], 32, np.random.default_rng(SEED))
    start, recent, steps = time.time() - seconds, [], len(plan)
    for step in range(first, steps):
        length, rate = plan[step]
        tokens = windows(stream, length, TOKENS_PER_STEP // length, np.random.default_rng([SEED, step]))
        tokens = tokens.reshape(-1, max(1, TOKENS_PER_PART // length), length + 1)
        p, m, v, value = update(p, m, v, tokens, float(step), rate)
        recent.append(value)
        if (step + 1) % 50 == 0:
            seconds = time.time() - start
            print(
                f"step {step + 1} of {steps}, {seconds / 60:.1f} min: bits a byte "
                f"{np.mean(recent) / np.log(2):.3f} trained, {measure(p, sample) / np.log(2):.3f} held out",
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


def write(path, p):
    w = gguf.GGUFWriter(path, "llama")
    w.add_type("model")
    w.add_name("paged-kv toy (King James Bible, byte level)")
    w.add_description(
        "A toy that lets the example `generate` of paged-kv run without a download. It imitates the sound "
        "of its text, no more: it knows nothing, follows no instructions and must not be relied on."
    )
    w.add_license("CC0-1.0")
    w.add_languages(["en"])
    w.add_string("general.source.description", "King James Version (1611), from the Debian package bible-kjv-text")
    w.add_block_count(LAYERS)
    w.add_context_length(CONTEXT)
    w.add_embedding_length(DIM)
    w.add_feed_forward_length(FFN)
    w.add_head_count(HEADS)
    w.add_head_count_kv(KV_HEADS)
    w.add_key_length(HEAD_DIM)
    w.add_value_length(HEAD_DIM)
    w.add_layer_norm_rms_eps(EPS)
    w.add_rope_freq_base(ROPE_BASE)
    w.add_rope_dimension_count(HEAD_DIM)
    w.add_vocab_size(VOCAB)
    w.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
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
            w.add_tensor(name, gguf.quants.quantize(value.astype(np.float32), QUANT), raw_dtype=QUANT)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def main():
    args = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    args.add_argument("--scale", type=float, default=1.0, help="take this share of the steps, for a trial")
    args.add_argument("--out", type=pathlib.Path, default=HERE / "toy.gguf")
    args = args.parse_args()
    train_texts, held_out = split(chapters())
    stream = stream_of(train_texts)
    print(f"{len(stream)} tokens to train on, {sum(map(len, held_out))} bytes in {len(held_out)} chapters held out")
    checkpoint = args.out.with_suffix(".ckpt.npz")
    write(args.out, train(stream, stream_of(held_out), schedule(args.scale), checkpoint))
    checkpoint.unlink(missing_ok=True)
    print(f"{args.out.stat().st_size} bytes; held out: {reference.Model(args.out).bits_per_byte(held_out):.4f} bits a byte")


if __name__ == "__main__":
    main()
