// Logits are products times a scale.

fn logit_of(product: f32) -> f32 {
    return product * layer.scale_log2;
}
