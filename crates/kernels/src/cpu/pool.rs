//! A fixed set of worker threads that run one operation at a time.
//!
//! A decoder step is hundreds of operations of a few microseconds each, so a dispatch must cost about one. Idle workers
//! spin for some tens of microseconds, then park. Nobody waits for a thread that the operating system has not
//! scheduled yet: a share that its worker has not claimed when the caller is done is run by the caller.
//!
//! Invariants:
//! - In run `e` the share of worker `i` is run by whoever moves `claimed[i]` from `e - 1` to `e`: exactly once.
//! - `run` returns only when all shares have ended, so borrowed data outlives every use of it.

use std::any::Any;
use std::cell::UnsafeCell;
use std::hint::spin_loop;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle, Thread};

/// Spins of an idle worker before it parks; one takes 15 to 45 ns, by processor.
const IDLE_SPINS: u32 = 2_000;
/// Spins of the caller at the end of a run before it yields its core.
const JOIN_SPINS: u32 = 500;
/// Yields of the caller before it parks.
const JOIN_YIELDS: u32 = 50;

/// Worker threads; the calling thread is worker 0.
pub struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

impl Pool {
    /// Starts `n_workers - 1` threads.
    pub fn new(n_workers: usize) -> Self {
        assert!(n_workers > 0);
        let shared = Arc::new(Shared {
            epoch: Line(AtomicU64::new(0)),
            running: Line(AtomicUsize::new(0)),
            workers: (1..n_workers).map(|_| Line(WorkerState::default())).collect(),
            job: UnsafeCell::new(Job { call: |_, _| (), data: std::ptr::null() }),
            caller_waits: AtomicBool::new(false),
            caller: Mutex::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
        });
        let start = |worker: usize| {
            let shared = Arc::clone(&shared);
            thread::Builder::new()
                .name(format!("kwire-cpu-{worker}"))
                .spawn(move || shared.work(worker))
                .expect("the operating system refused a thread")
        };
        let threads = (1..n_workers).map(start).collect();
        Self { shared, threads }
    }

    /// Number of workers, the calling thread included.
    pub fn n_workers(&self) -> usize {
        self.threads.len() + 1
    }

    /// Calls `f(worker)` once for each worker, side by side where cores allow, and returns when all have ended.
    ///
    /// The calls must not wait for each other: a thread may run several of them in turn. A panic of any call
    /// is raised again here.
    pub fn run<F: Fn(usize) + Sync>(&mut self, f: F) {
        if self.threads.is_empty() {
            return f(0);
        }
        let epoch = self.start(&f);
        let mut result = catch_unwind(AssertUnwindSafe(|| f(0)));
        for (i, worker) in self.shared.workers.iter().enumerate() {
            if worker.0.claim(epoch) {
                let stolen = catch_unwind(AssertUnwindSafe(|| f(i + 1)));
                result = result.and(stolen);
                self.shared.running.0.fetch_sub(1, Ordering::AcqRel);
            }
        }
        self.shared.join();
        if let Some(payload) = lock(&self.shared.panic).take() {
            resume_unwind(payload);
        }
        if let Err(payload) = result {
            resume_unwind(payload);
        }
    }

    /// Publishes the job and wakes parked workers; gives the number of the run.
    fn start<F: Fn(usize) + Sync>(&mut self, f: &F) -> u64 {
        let shared = &*self.shared;
        shared.running.0.store(self.threads.len(), Ordering::Relaxed);
        // SAFETY: no run is under way (`&mut self`, and `run` joins), and workers read the job only after a claim of a
        // run that has been published, so nobody reads it now.
        unsafe {
            *shared.job.get() = Job { call: call_as::<F>, data: std::ptr::from_ref(f).cast() };
        }
        // Sequentially consistent, as are the worker's two accesses around its decision to park: one of us sees the other.
        let epoch = shared.epoch.0.fetch_add(1, Ordering::SeqCst) + 1;
        for (worker, thread) in shared.workers.iter().zip(&self.threads) {
            if worker.0.parked.load(Ordering::SeqCst) {
                thread.thread().unpark();
            }
        }
        epoch
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Release);
        self.shared.epoch.0.fetch_add(1, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // A worker catches the panics of the jobs, so it ends in order.
            let _ = thread.join();
        }
    }
}

/// Keeps what different threads write apart (two lines: processors prefetch lines in pairs).
#[repr(align(128))]
struct Line<T>(T);

#[derive(Default)]
struct WorkerState {
    /// Last run whose share of this worker was taken.
    claimed: AtomicU64,
    /// The worker has decided to park.
    parked: AtomicBool,
}

impl WorkerState {
    fn claim(&self, epoch: u64) -> bool {
        self.claimed.compare_exchange(epoch - 1, epoch, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

/// A borrowed closure without its type and lifetime.
#[derive(Clone, Copy)]
struct Job {
    /// May be called with `data` while the run that published it is under way.
    call: unsafe fn(*const (), usize),
    data: *const (),
}

/// # Safety
/// `data` points to a live `F`.
unsafe fn call_as<F: Fn(usize) + Sync>(data: *const (), worker: usize) {
    // SAFETY: by this function's own condition; `F: Sync` allows the call from any thread.
    unsafe { (*data.cast::<F>())(worker) }
}

struct Shared {
    /// Number of the current run.
    epoch: Line<AtomicU64>,
    /// Shares of the run that have not ended, worker 0's left out.
    running: Line<AtomicUsize>,
    /// State of workers 1, 2, ...
    workers: Box<[Line<WorkerState>]>,
    job: UnsafeCell<Job>,
    caller_waits: AtomicBool,
    /// The thread to wake, set while `caller_waits`.
    caller: Mutex<Option<Thread>>,
    /// The first panic of a worker in this run.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
}

// SAFETY: `job` is written only between runs and read only within one (see `Pool::start`), and what it points to
// is `Sync`; all other fields are safe to share by themselves.
unsafe impl Sync for Shared {}
// SAFETY: as above; nothing in it is tied to a thread.
unsafe impl Send for Shared {}

impl Shared {
    /// The life of a worker thread.
    fn work(&self, worker: usize) {
        let me = &self.workers[worker - 1].0;
        let mut seen = 0;
        loop {
            seen = self.next_epoch(me, seen);
            if self.stop.load(Ordering::Acquire) {
                return;
            }
            if me.claim(seen) {
                // SAFETY: the claim succeeded, so run `seen` is under way and waits for this share: the job is its
                // own and does not change, and what it points to lives.
                let result = catch_unwind(AssertUnwindSafe(|| unsafe {
                    let job = *self.job.get();
                    (job.call)(job.data, worker);
                }));
                if let Err(payload) = result {
                    lock(&self.panic).get_or_insert(payload);
                }
                self.finish();
            }
        }
    }

    /// Waits for a run later than `seen`: spins for a while, then parks.
    fn next_epoch(&self, me: &WorkerState, seen: u64) -> u64 {
        for _ in 0..IDLE_SPINS {
            let epoch = self.epoch.0.load(Ordering::Acquire);
            if epoch != seen {
                return epoch;
            }
            spin_loop();
        }
        me.parked.store(true, Ordering::SeqCst);
        loop {
            let epoch = self.epoch.0.load(Ordering::SeqCst);
            if epoch != seen {
                me.parked.store(false, Ordering::Relaxed);
                return epoch;
            }
            thread::park();
        }
    }

    /// Ends a share that a worker ran.
    fn finish(&self) {
        if self.running.0.fetch_sub(1, Ordering::SeqCst) == 1
            && self.caller_waits.load(Ordering::SeqCst)
            && let Some(caller) = &*lock(&self.caller)
        {
            caller.unpark();
        }
    }

    /// Waits until no share runs: spins, then yields (the worker may need this very core), then parks.
    fn join(&self) {
        let done = || self.running.0.load(Ordering::SeqCst) == 0;
        for attempt in 0..JOIN_SPINS + JOIN_YIELDS {
            if done() {
                return;
            }
            if attempt < JOIN_SPINS {
                spin_loop();
            } else {
                thread::yield_now();
            }
        }
        *lock(&self.caller) = Some(thread::current());
        self.caller_waits.store(true, Ordering::SeqCst);
        while !done() {
            thread::park();
        }
        self.caller_waits.store(false, Ordering::Relaxed);
    }
}

/// Locks; a panic elsewhere does not matter, since each critical section is one assignment.
fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
#[expect(clippy::disallowed_methods, reason = "slow and parked workers are what these tests are about")]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn each_worker_is_called_once_in_each_run() {
        for n_workers in [1, 2, 3, 8] {
            let mut pool = Pool::new(n_workers);
            assert_eq!(pool.n_workers(), n_workers);
            let counts: Vec<AtomicUsize> = (0..n_workers).map(|_| AtomicUsize::new(0)).collect();
            for run in 1..=2_000 {
                pool.run(|worker| {
                    counts[worker].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == run));
                if run % 500 == 0 {
                    thread::sleep(Duration::from_millis(2)); // Lets the workers park.
                }
            }
        }
    }

    #[test]
    fn waits_for_a_slow_worker() {
        let mut pool = Pool::new(2);
        for _ in 0..5 {
            let done = AtomicBool::new(false);
            pool.run(|worker| {
                if worker == 1 {
                    thread::sleep(Duration::from_millis(3));
                    done.store(true, Ordering::Relaxed);
                } else {
                    thread::sleep(Duration::from_millis(1)); // Gives worker 1 the time to claim its share.
                }
            });
            assert!(done.load(Ordering::Relaxed));
        }
    }

    #[test]
    fn panics_reach_the_caller_and_the_pool_survives() {
        let mut pool = Pool::new(3);
        for bad in 0..3 {
            let result = catch_unwind(AssertUnwindSafe(|| pool.run(|worker| assert_ne!(worker, bad, "boom"))));
            assert!(result.is_err());
        }
        let sum = AtomicUsize::new(0);
        pool.run(|worker| {
            sum.fetch_add(worker, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 3);
    }
}
