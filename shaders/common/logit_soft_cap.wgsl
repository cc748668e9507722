// Logits are capped: `cap * tanh(scale * product / cap)`. `tanh` itself is left to the driver by WGSL, and some overflow.

fn logit_of(product: f32) -> f32 {
    // Twice the argument of tanh, times log2(e). No power of two of what is not positive overflows.
    let x = product * layer.scale_log2;
    let t = exp2(-abs(x));
    let capped = layer.soft_cap_log2 * (1.0 - t) / (1.0 + t);
    return select(-capped, capped, x >= 0.0);
}
