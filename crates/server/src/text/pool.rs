//! A few blocking threads for tokenizing and rendering, so that long prompts do not hold up streams.

use std::sync::Arc;

use tokio::sync::Semaphore;

/// Runs text work off the async threads, a bounded number of pieces at a time; the rest waits in order. Open
/// connections bound how many bodies can wait to be parsed, admission how many texts to be tokenized.
#[derive(Clone)]
pub struct TextPool {
    permits: Arc<Semaphore>,
}

impl TextPool {
    /// A pool that runs `n_threads` pieces of work at once, at least one.
    pub fn new(n_threads: usize) -> Self {
        Self { permits: Arc::new(Semaphore::new(n_threads.max(1))) }
    }

    /// Runs `work` on a blocking thread. A panic in it comes out here.
    pub async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> T {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.unwrap_or_else(|_| unreachable!("the semaphore is never closed"));
        let task = tokio::task::spawn_blocking(move || {
            let _permit = permit;
            work()
        });
        match task.await {
            Ok(value) => value,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                Err(_) => std::future::pending().await, // cancelled: the runtime is shutting down
            },
        }
    }
}
