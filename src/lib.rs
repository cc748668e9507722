//! Paged key-value residency and paged attention on any GPU that wgpu reaches.
