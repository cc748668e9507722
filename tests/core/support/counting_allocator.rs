//! The system's allocator, counting what each thread has asked of it, and refusing what a test says. A binary that has
//! this module uses it.
#![allow(
    unsafe_code,
    reason = "a global allocator is an unsafe trait; this one counts, and calls the system's or returns null"
)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::ptr::null_mut;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
    /// Bytes allocated and not freed by this thread.
    static BYTES: Cell<i64> = const { Cell::new(0) };
    /// Sizes from which on this thread has no memory.
    static REFUSED: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn count(bytes: i64) {
    BYTES.with(|held| held.set(held.get() + bytes));
}

fn is_refused(bytes: usize) -> bool {
    bytes >= REFUSED.with(Cell::get)
}

struct Counting;

// SAFETY: every call goes to the system's allocator unchanged, or fails and changes nothing; the counters are plain cells
// without destructors.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        if is_refused(layout.size()) {
            return null_mut();
        }
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
        if is_refused(new_size) {
            return null_mut();
        }
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

/// Runs `work` while this thread has no memory for anything of `bytes` or more.
#[allow(dead_code, reason = "not every binary refuses some")]
pub(crate) fn without_memory_for<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    REFUSED.with(|refused| refused.set(bytes));
    let done = work();
    REFUSED.with(|refused| refused.set(usize::MAX));
    done
}

/// Bytes that this thread has allocated, less those that it has freed.
pub(crate) fn held_bytes() -> i64 {
    BYTES.with(Cell::get)
}
