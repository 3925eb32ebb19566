//! Spreading independent work items over the pool, and the shared memory that they write disjoint parts of.

use std::cell::UnsafeCell;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Pool;

/// Below this much work (estimated, on one core) a dispatch costs more than it saves.
const WORTH_DISPATCH_NS: usize = 6_000;

/// Calls `f(worker, item)` for all items. Workers take the next item when they are free, so a result must not depend
/// on who computes it. Work estimated below the cost of a dispatch is done by the caller.
pub(crate) fn for_each(pool: &mut Pool, n_items: usize, work_ns: usize, f: impl Fn(usize, usize) + Sync) {
    if n_items <= 1 || pool.n_workers() == 1 || work_ns < WORTH_DISPATCH_NS {
        return (0..n_items).for_each(|item| f(0, item));
    }
    let next = AtomicUsize::new(0);
    pool.run(|worker| {
        loop {
            let item = next.fetch_add(1, Ordering::Relaxed);
            if item >= n_items {
                break;
            }
            f(worker, item);
        }
    });
}

/// Calls `f(range)` for chunks of `0..n_rows`; `row_ns` estimates one row's work.
pub(crate) fn for_rows(pool: &mut Pool, n_rows: usize, row_ns: usize, f: impl Fn(std::ops::Range<usize>) + Sync) {
    let work_ns = n_rows * row_ns;
    if pool.n_workers() == 1 || work_ns < WORTH_DISPATCH_NS {
        return f(0..n_rows);
    }
    // Chunks of a few microseconds: small enough to balance, large enough that the shared counter costs nothing.
    let chunk = n_rows.div_ceil(4 * pool.n_workers()).min((8_000 / row_ns.max(1)).max(1));
    for_each(pool, n_rows.div_ceil(chunk), work_ns, |_, i| f(i * chunk..((i + 1) * chunk).min(n_rows)));
}

/// A mutable slice whose disjoint parts are written by several workers.
pub(crate) struct Disjoint<'a, T> {
    ptr: *mut T,
    len: usize,
    _borrow: PhantomData<&'a mut [T]>,
}

// SAFETY: access goes through `slice`, whose callers promise that no element is reached from two places.
unsafe impl<T: Send> Sync for Disjoint<'_, T> {}

impl<'a, T> Disjoint<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self { ptr: slice.as_mut_ptr(), len: slice.len(), _borrow: PhantomData }
    }

    /// Elements `start..start + len`.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps it does.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start);
        // SAFETY: in bounds of the slice that is mutably borrowed for 'a; disjointness is the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(start), len) }
    }
}

/// One value for each worker, on cache lines of its own.
pub(crate) struct PerWorker<T>(Vec<Slot<T>>);

#[repr(align(128))]
struct Slot<T>(UnsafeCell<T>);

// SAFETY: `get` hands out the value of one worker, and each worker index is active at most once at a time.
unsafe impl<T: Send> Sync for PerWorker<T> {}

impl<T: Default> PerWorker<T> {
    pub(crate) fn new(n_workers: usize) -> Self {
        Self((0..n_workers).map(|_| Slot(UnsafeCell::new(T::default()))).collect())
    }

    /// The value of `worker`.
    ///
    /// # Safety
    /// Called with the index that [`for_each`] gave, and the result is dropped before the item ends.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn get(&self, worker: usize) -> &mut T {
        // SAFETY: `Pool::run` calls each worker index once, and an item is processed within that call.
        unsafe { &mut *self.0[worker].0.get() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_item_once() {
        for n_workers in [1, 2, 5] {
            let mut pool = Pool::new(n_workers);
            for n in [0, 1, 2, 7, 1000] {
                for work in [0, usize::MAX / (n + 1)] {
                    let mut counts = vec![0u32; n];
                    let shared = Disjoint::new(&mut counts);
                    // SAFETY: each item is its own element.
                    for_each(&mut pool, n, work, |_, i| unsafe { shared.slice(i, 1)[0] += 1 });
                    // SAFETY: the ranges do not overlap.
                    for_rows(&mut pool, n, work / (n + 1), |r| unsafe {
                        shared.slice(r.start, r.len()).iter_mut().for_each(|c| *c += 1);
                    });
                    assert!(counts.iter().all(|&c| c == 2));
                }
            }
        }
    }
}
