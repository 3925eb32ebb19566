//! Which of the gateway's prefixes the engine holds, with enough history to report changes only.

use std::collections::{HashMap, HashSet, VecDeque};

use kwire_engine::PrefixChange;
use kwire_protocol::load::PrefixReport;

/// Changes kept; a gateway that missed more gets the whole set.
const HISTORY: usize = 8192;

/// The set of prefixes held, and how it became so.
pub struct PrefixLog {
    epoch: u64,
    version: u64,
    held: HashSet<u64>,
    /// `(stored, id)` of each change; the last is that of `version`.
    history: VecDeque<(bool, u64)>,
}

impl PrefixLog {
    /// An empty set; `epoch` names this process.
    pub fn new(epoch: u64) -> Self {
        Self { epoch, version: 0, held: HashSet::new(), history: VecDeque::new() }
    }

    /// Takes a step's changes.
    pub fn apply(&mut self, changes: &[PrefixChange]) {
        for &change in changes {
            let (id, stored) = match change {
                PrefixChange::Stored(id) => (id, true),
                PrefixChange::Evicted(id) => (id, false),
            };
            let is_news = if stored { self.held.insert(id) } else { self.held.remove(&id) };
            if is_news {
                self.note(stored, id);
            }
        }
    }

    fn note(&mut self, stored: bool, id: u64) {
        self.version += 1;
        if self.history.len() == HISTORY {
            self.history.pop_front();
        }
        self.history.push_back((stored, id));
    }

    /// The changes since `version` of `epoch`; the whole set if they are not known any more.
    pub fn report(&self, since: Option<(u64, u64)>) -> PrefixReport {
        let mut report = PrefixReport { epoch: self.epoch, version: self.version, ..PrefixReport::default() };
        let missed = since
            .filter(|&(epoch, version)| epoch == self.epoch && version <= self.version)
            .map(|(_, version)| self.version - version)
            .filter(|&missed| missed <= self.history.len() as u64);
        let Some(missed) = missed else {
            report.full = true;
            report.stored = self.held.iter().copied().collect();
            return report;
        };
        let mut last = HashMap::new();
        for &(stored, id) in self.history.iter().skip(self.history.len() - missed as usize) {
            last.insert(id, stored);
        }
        for (id, stored) in last {
            if stored { report.stored.push(id) } else { report.evicted.push(id) }
        }
        report
    }
}

#[cfg(test)]
mod tests {
    use PrefixChange::{Evicted, Stored};

    use super::*;

    #[test]
    fn changes_since_a_version() {
        let mut log = PrefixLog::new(7);
        log.apply(&[Stored(1), Stored(2)]);
        let first = log.report(None);
        assert!(first.full && first.version == 2 && first.stored.len() == 2);
        // An id that was stored and lost within a step is not held; one that was lost and stored again is.
        log.apply(&[Evicted(1), Evicted(9), Stored(3), Stored(2), Stored(5), Evicted(5), Evicted(2), Stored(2)]);
        let mut next = log.report(Some((7, 2)));
        next.stored.sort_unstable();
        next.evicted.sort_unstable();
        assert_eq!((next.full, next.stored, next.evicted, next.version), (false, vec![2, 3], vec![1, 5], 8));
        assert!(log.report(Some((8, 2))).full);
        assert_eq!(log.report(Some((7, 8))).stored, Vec::<u64>::new());
    }
}
