#!/usr/bin/env python3
"""A plain NumPy forward pass over the toys' files, independent of the training code.

    python reference.py                  writes golden.json from toy.gguf
    python reference.py --held-out       prints the held-out bits per byte as well
    python reference.py windowed         writes windowed-golden.json from windowed.gguf
    python reference.py differences      prints what the windowed toy's ways to attend change

It takes sizes and weights from the file alone, dequantises the weights and
computes, one layer after the other, without a key/value cache: the toy in f32,
the windowed toy in f64.
"""

import hashlib
import json
import pathlib
import re
import sys

import gguf
import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
PROMPTS = ["Blessed are", "And Moses said unto the people, ", "The king of a far country"]
COUNT = 48
# Riddles; see train.py. Shorter than the window of 12 tokens, and up to fifteen times as long.
WINDOWED_PROMPTS = [
    "du ub bd.",
    "dx pe hq kp qm yh mk ed xy.",
    "mi dt es hp fo rm vz tr pd le zk gw ol wf sh kn iv ng.",
    "uj qp hv ds vd xu fk zr lb wg ja yc ty ml ih am cf rw bq kn ez oe no pi gx st.",
    "mi vh wz fj xs qk jw un re iy su pt lv ef km nl zp yx tq hr.00re01ef02fj03jw04wz05zp06pt07tq08qk09km10mi11iy12yx"
    "13xs14su15un16nl17lv18vh19hr20re21ef22fj23jw24wz25zp26pt27tq28qk29km",
]
WINDOWED_COUNT = 72
NEAR_TIE = 0.01
WINDOW = 512  # for the bits per byte


class Model:
    def __init__(self, path, precision=np.float32):
        reader = gguf.GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
        assert architecture in ("llama", "windowed-llama")

        def get(key, default=None):
            field = reader.fields.get(f"{architecture}.{key}")
            assert field is not None or default is not None, key
            return default if field is None else field.contents()

        assert reader.fields["tokenizer.ggml.model"].contents() == "bytes"
        self.layers = get("block_count")
        self.context = get("context_length")
        self.heads = get("attention.head_count")
        self.kv_heads = get("attention.head_count_kv")
        self.head_dim = get("rope.dimension_count")
        self.eps = precision(get("attention.layer_norm_rms_epsilon"))
        self.base = get("rope.freq_base")
        # Of `pattern` layers, all but the last see a window: 0 tokens for no window.
        window, pattern = get("attention.sliding_window", 0), get("attention.sliding_window_pattern", 0)
        self.windows = [0 if pattern and (n + 1) % pattern == 0 else window for n in range(self.layers)]
        self.soft_cap = precision(get("attn_logit_softcapping", 0.0))
        self.end = reader.fields["tokenizer.ggml.eos_token_id"].contents()
        self.w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(precision) for t in reader.tensors}
        angle = np.arange(self.context)[:, None] * self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.cos, self.sin = np.cos(angle).astype(precision), np.sin(angle).astype(precision)
        self.precision = precision

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x):
        """Turns the pairs (even, odd) of x[head, position, :]."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def weights(self, n, s):
        """What each row makes of each key's value: s[head, row, key] are the products, scaled."""
        length = s.shape[-1]
        if self.soft_cap:
            s = self.soft_cap * np.tanh(s / self.soft_cap)
        seen = np.tril(np.ones((length, length), bool))
        if self.windows[n]:  # the latest so many keys, the row's own among them
            seen &= ~np.tril(seen, -self.windows[n])
        s = np.where(seen, s, self.precision(-np.inf))
        sinks = self.w.get(f"blk.{n}.attn_sinks.weight")
        top = s.max(-1, keepdims=True)
        if sinks is not None:
            top = np.maximum(top, sinks[:, None, None])
        s = np.exp(s - top)
        total = s.sum(-1, keepdims=True)
        if sinks is not None:
            total += np.exp(sinks[:, None, None] - top)
        return s / total

    def logits(self, ids):
        """One row of logits a position."""
        length = len(ids)
        w = self.w
        x = w["token_embd.weight"][ids]

        def heads(y):
            return y.reshape(length, -1, self.head_dim).transpose(1, 0, 2)

        for n in range(self.layers):
            b = f"blk.{n}."
            h = self.norm(x, b + "attn_norm.weight")
            q = self.rotate(heads(h @ w[b + "attn_q.weight"].T))
            k = self.rotate(heads(h @ w[b + "attn_k.weight"].T))
            v = heads(h @ w[b + "attn_v.weight"].T)
            # Query head h reads key/value head h / (heads / kv_heads).
            k, v = (np.repeat(y, self.heads // self.kv_heads, 0) for y in (k, v))
            s = self.weights(n, q @ k.transpose(0, 2, 1) * self.precision(self.head_dim**-0.5))
            x = x + (s @ v).transpose(1, 0, 2).reshape(length, -1) @ w[b + "attn_output.weight"].T
            h = self.norm(x, b + "ffn_norm.weight")
            gate = h @ w[b + "ffn_gate.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * (h @ w[b + "ffn_up.weight"].T)) @ w[b + "ffn_down.weight"].T
        return self.norm(x, "output_norm.weight") @ w["token_embd.weight"].T

    def bits_per_byte(self, texts):
        """Bits for the texts and the end of each, over their bytes.

        Each text starts anew after an end-of-text token. A text longer than
        WINDOW is read in windows that overlap by half: each of its tokens is
        counted once, with all of the text or at least WINDOW / 2 tokens before it.
        """
        bits = 0.0
        half = WINDOW // 2
        for text in texts:
            ids = np.array([self.end, *text, self.end])
            done = 1  # the tokens that are already counted
            while done < len(ids):
                start = 0 if done == 1 else done - half
                window = ids[start : start + WINDOW + 1]
                z = self.logits(window[:-1])[done - start - 1 :].astype(np.float64)
                z -= z.max(-1, keepdims=True)
                targets = window[done - start :]
                bits += np.sum(np.log(np.exp(z).sum(-1)) - z[np.arange(len(z)), targets]) / np.log(2)
                done = start + len(window)
        return bits / sum(map(len, texts))

    def solved(self, riddles):
        """The share of the walks' tokens that are the best ones where they are due."""
        right = total = 0
        for ids in riddles:
            dot = list(ids).index(ord("."))
            ends = np.flatnonzero(ids == self.end)
            due = ids[dot + 1 : ends[0] + 1 if len(ends) else None]
            best = self.logits(ids[:-1])[dot : dot + len(due)].argmax(-1)
            right, total = right + np.sum(best == due), total + len(due)
        return right / total

    def greedy(self, ids, count):
        """The best next token `count` times, and each time its lead over the second best."""
        ids, gaps = list(ids), []
        for _ in range(count):
            z = self.logits(np.array(ids))[-1]
            second, best = np.argsort(z)[-2:]
            gaps.append(round(float(z[best] - z[second]), 4))
            ids.append(int(best))
        return ids[-count:], gaps


def golden(path, prompt_texts, count, precision):
    model = Model(path, precision)
    prompts = []
    for prompt in prompt_texts:
        ids = list(prompt.encode())
        tokens, gaps = model.greedy(ids, count)
        top = []
        for z in model.logits(np.array(ids + tokens))[len(ids) - 1 : len(ids) + 3]:
            best = np.argsort(z)[::-1][:5]
            top.append([[int(i), round(float(z[i]), 5)] for i in best])
        prompts.append(
            {
                "prompt": prompt,
                "prompt_ids": ids,
                "token_ids_f32": tokens,
                "text": bytes(t for t in tokens if t < 256).decode("utf-8", "replace"),
                "first_end_of_text": tokens.index(model.end) if model.end in tokens else -1,
                "gaps": gaps,
                "comparable_f32": next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), count),
                "top5_f32": top,
            }
        )
    return {
        "notes": {
            "model": f"{path.name} (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}), weights dequantised to f32 before use",
            "engine": f"reference.py: NumPy, f{np.finfo(precision).bits}, no key/value cache",
            "decoding": "greedy; it does not stop at the end-of-text token (id 256)",
            "fields": "gaps[i]: best minus second-best logit at position i; comparable_f32: number of leading positions "
            "before the first near-tie (gap below 0.01), where equal tokens are due; top5_f32: the five best "
            "[id, logit] at the first four positions",
        },
        "prompts": prompts,
    }


def write_golden(name, *how):
    text = json.dumps(golden(*how), indent=1)
    # Lists of numbers on one line each.
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text)
    (HERE / name).write_text(text + "\n")


def differences(path):
    """What becomes of the golden continuations where one of the ways to attend is left out or a little wrong."""

    def all_layers(model, window):
        model.windows = [window] * model.layers

    def windowed_layers(model, window):
        model.windows = [window if w else 0 for w in model.windows]

    def without_sinks(model):
        model.w = {name: w for name, w in model.w.items() if "sinks" not in name}

    def without_soft_cap(model):
        model.soft_cap = 0

    def layers_moved(model):
        model.windows = model.windows[-1:] + model.windows[:-1]

    def heads_swapped(model):
        model.w = {name: w[::-1] if "sinks" in name else w for name, w in model.w.items()}

    variants = {
        "no window at all": lambda model: all_layers(model, 0),
        "a window in the last layer, too": lambda model: all_layers(model, 12),
        "a window of 11 tokens": lambda model: windowed_layers(model, 11),
        "a window of 13 tokens": lambda model: windowed_layers(model, 13),
        "the first layer sees everything, not the last": layers_moved,
        "no soft-cap": without_soft_cap,
        "no sinks": without_sinks,
        "sinks of the heads in reverse": heads_swapped,
    }
    model = Model(path, np.float64)
    texts = [(ids, ids + model.greedy(ids, WINDOWED_COUNT)[0]) for ids in (list(p.encode()) for p in WINDOWED_PROMPTS)]
    rows = [model.logits(np.array(text))[len(ids) - 1 : -1] for ids, text in texts]
    print("| Wrong | Largest change of a logit | Other tokens |\n|---|---|---|")
    for name, change in variants.items():
        changed = Model(path, np.float64)
        change(changed)
        others = [changed.logits(np.array(text))[len(ids) - 1 : -1] for ids, text in texts]
        largest = max(np.abs(other - row).max() for other, row in zip(others, rows))
        shares = [f"{np.mean(other.argmax(-1) != row.argmax(-1)):.0%}" for other, row in zip(others, rows)]
        print(f"| {name} | {largest:.2f} | {', '.join(shares)} |")


if __name__ == "__main__":
    if "differences" in sys.argv[1:]:
        differences(HERE / "windowed.gguf")
    elif "windowed" in sys.argv[1:]:
        write_golden(
            "windowed-golden.json", HERE / "windowed.gguf", WINDOWED_PROMPTS, WINDOWED_COUNT, np.float64
        )
    else:
        if "--held-out" in sys.argv[1:]:
            import train

            held_out = train.split(train.chapters())[1]
            print(f"{Model(HERE / 'toy.gguf').bits_per_byte(held_out):.4f} bits a byte")
        write_golden("golden.json", HERE / "toy.gguf", PROMPTS, COUNT, np.float32)
