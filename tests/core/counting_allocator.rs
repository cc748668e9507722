//! The system's allocator, counting what each thread has asked of it. A binary that has this module uses it.
#![allow(
    unsafe_code,
    reason = "a global allocator is an unsafe trait; this one counts and calls the system's"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes allocated and not freed by this thread.
    static BYTES: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    BYTES.with(|held| held.set(held.get() + bytes));
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged; the counters are plain cells without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        count(layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        count(new_size as i64 - layout.size() as i64);
        // SAFETY: the caller's promises are passed on.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Allocations of this thread so far.
#[allow(dead_code, reason = "not every binary counts them")]
pub(crate) fn num_allocations() -> u64 {
    ALLOCATIONS.with(Cell::get)
}

/// Bytes that this thread has allocated, less those that it has freed.
pub(crate) fn held_bytes() -> i64 {
    BYTES.with(Cell::get)
}
