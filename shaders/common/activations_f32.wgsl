// The app's tensors in f32: a unit is four elements.
alias Unit = vec4<f32>;
// Masks indices into `query`. The host binds less than 2 GiB (`MAX_TENSOR_BYTES`), so no index loses a bit; and a compiler
// that sees that an index times 16 plus a constant cannot wrap leaves the addition to the load instruction.
const UNIT_MASK = 0x07ffffffu;

fn elements_of(unit: Unit) -> vec4<f32> {
    return unit;
}

fn unit_of(elements: vec4<f32>) -> Unit {
    return elements;
}
