//! Recorded steps: one CUDA graph for each shape of decode step.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use cudarc::driver::{result, sys};

use super::device::Device;

/// Graphs by their number of tokens; `None`: one step of the size was run, and none recorded.
#[derive(Default)]
pub struct Graphs(HashMap<usize, Option<sys::CUgraphExec>>);

// SAFETY: driver handles with one owner.
unsafe impl Send for Graphs {}

impl Graphs {
    /// Replays the graph of `key`; false if there is none yet.
    pub fn replay(&self, device: &Device, key: usize) -> bool {
        let Some(&Some(graph)) = self.0.get(&key) else { return false };
        // SAFETY: an instantiated graph whose buffers live as long as the backend.
        device.note("replaying a graph", unsafe { result::graph::launch(graph, device.stream()) });
        true
    }

    /// Whether this is the first step of `key`.
    pub fn first_use(&mut self, key: usize) -> bool {
        match self.0.entry(key) {
            Entry::Vacant(unseen) => unseen.insert(None).is_none(),
            Entry::Occupied(_) => false,
        }
    }

    /// Starts to record what is enqueued.
    pub fn begin(device: &Device) {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        device.note("recording a graph", unsafe { result::stream::begin_capture(device.stream(), mode) });
    }

    /// Ends a recording and keeps it under `key`.
    pub fn end(&mut self, device: &Device, key: usize) {
        // SAFETY: follows `begin`; the raw graph is not needed once it is instantiated.
        let graph = unsafe {
            result::stream::end_capture(device.stream()).and_then(|graph| {
                let flags = sys::CUgraphInstantiate_flags(0);
                let executable = result::graph::instantiate(graph, flags);
                result::graph::destroy(graph)?;
                executable
            })
        };
        match graph {
            Ok(graph) => {
                self.0.insert(key, Some(graph));
            }
            Err(error) => device.note("recording a graph", Err(error)),
        }
    }
}

impl Drop for Graphs {
    fn drop(&mut self) {
        for graph in self.0.drain().filter_map(|(_, graph)| graph) {
            // SAFETY: made in `end`; no replay is enqueued once the backend is dropped and synchronized.
            let _ = unsafe { result::graph::exec_destroy(graph) };
        }
    }
}
