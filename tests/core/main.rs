//! Tests of the host core; they need no GPU and no wgpu.
