#!/usr/bin/env python3
"""A plain NumPy forward pass over the toy's file, independent of the training code.

    python reference.py                  writes golden.json from toy.gguf
    python reference.py --held-out       prints the held-out bits per byte as well

It takes sizes and weights from the file alone, dequantises the weights and
computes in f32, one layer after the other, without a key/value cache.
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
NEAR_TIE = 0.01
WINDOW = 512  # for the bits per byte


class Model:
    def __init__(self, path):
        reader = gguf.GGUFReader(path)

        def get(key):
            return reader.fields[key].contents()

        assert get("general.architecture") == "llama" and get("tokenizer.ggml.model") == "bytes"
        self.layers = get("llama.block_count")
        self.context = get("llama.context_length")
        self.heads = get("llama.attention.head_count")
        self.kv_heads = get("llama.attention.head_count_kv")
        self.head_dim = get("llama.rope.dimension_count")
        self.eps = np.float32(get("llama.attention.layer_norm_rms_epsilon"))
        self.base = get("llama.rope.freq_base")
        self.end = get("tokenizer.ggml.eos_token_id")
        self.w = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32) for t in reader.tensors}
        angle = np.arange(self.context)[:, None] * self.base ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.cos, self.sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def norm(self, x, name):
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + self.eps) * self.w[name]

    def rotate(self, x):
        """Turns the pairs (even, odd) of x[head, position, :]."""
        cos, sin = self.cos[: x.shape[1]], self.sin[: x.shape[1]]
        out = np.empty_like(x)
        out[..., 0::2] = x[..., 0::2] * cos - x[..., 1::2] * sin
        out[..., 1::2] = x[..., 0::2] * sin + x[..., 1::2] * cos
        return out

    def logits(self, ids):
        """One row of logits a position."""
        length = len(ids)
        w = self.w
        future = np.triu(np.ones((length, length), bool), 1)
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
            s = q @ k.transpose(0, 2, 1) * np.float32(self.head_dim**-0.5)
            s[:, future] = -np.inf
            s = np.exp(s - s.max(-1, keepdims=True))
            s /= s.sum(-1, keepdims=True)
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

    def greedy(self, ids, count):
        """The best next token `count` times, and each time its lead over the second best."""
        ids, gaps = list(ids), []
        for _ in range(count):
            z = self.logits(np.array(ids))[-1]
            second, best = np.argsort(z)[-2:]
            gaps.append(round(float(z[best] - z[second]), 4))
            ids.append(int(best))
        return ids[-count:], gaps


def golden(path):
    model = Model(path)
    prompts = []
    for prompt in PROMPTS:
        ids = list(prompt.encode())
        tokens, gaps = model.greedy(ids, COUNT)
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
                "comparable_f32": next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), COUNT),
                "top5_f32": top,
            }
        )
    return {
        "notes": {
            "model": f"toy.gguf (sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}), weights dequantised to f32 before use",
            "engine": "reference.py: NumPy, f32, no key/value cache",
            "decoding": "greedy; it does not stop at the end-of-text token (id 256)",
            "fields": "gaps[i]: best minus second-best logit at position i; comparable_f32: number of leading positions "
            "before the first near-tie (gap below 0.01), where equal tokens are due; top5_f32: the five best "
            "[id, logit] at the first four positions",
        },
        "prompts": prompts,
    }


if __name__ == "__main__":
    if "--held-out" in sys.argv[1:]:
        import train

        held_out = train.split(train.chapters())[1]
        print(f"{Model(HERE / 'toy.gguf').bits_per_byte(held_out):.4f} bits a byte")
    text = json.dumps(golden(HERE / "toy.gguf"), indent=1)
    # Lists of numbers on one line each.
    text = re.sub(r"\[[^\[\]{}\"]*\]", lambda m: re.sub(r"\s+", " ", m[0]).replace("[ ", "[").replace(" ]", "]"), text)
    (HERE / "golden.json").write_text(text + "\n")
