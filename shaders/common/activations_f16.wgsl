// The app's tensors in f16: a unit is four elements. Unpacking them needs no `shader-f16`.
alias Unit = vec2<u32>;
// As for f32, with units of half the size.
const UNIT_MASK = 0x0fffffffu;

fn elements_of(unit: Unit) -> vec4<f32> {
    return vec4<f32>(unpack2x16float(unit.x), unpack2x16float(unit.y));
}

fn unit_of(elements: vec4<f32>) -> Unit {
    return vec2<u32>(half_pair(elements.xy), half_pair(elements.zw));
}
