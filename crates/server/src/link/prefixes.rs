//! Which of the gateway's prefixes the engine holds, with enough history to report changes only.

use std::collections::{HashSet, VecDeque};

use kwire_protocol::load::PrefixReport;

/// Changes kept; a gateway that missed more gets the whole set.
const HISTORY: usize = 8192;

/// The set of prefixes held, and how it became so.
pub struct PrefixLog {
    epoch: u64,
    version: u64,
    held: HashSet<u64>,
    history: VecDeque<(bool, u64)>,
}

impl PrefixLog {
    /// An empty set; `epoch` names this process.
    pub fn new(epoch: u64) -> Self {
        Self { epoch, version: 0, held: HashSet::new(), history: VecDeque::new() }
    }

    /// Takes a step's changes.
    pub fn apply(&mut self, stored: &[u64], evicted: &[u64]) {
        for &id in evicted {
            if self.held.remove(&id) {
                self.note(false, id);
            }
        }
        for &id in stored {
            if self.held.insert(id) {
                self.note(true, id);
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
        let mut last = std::collections::HashMap::new();
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
    use super::*;

    #[test]
    fn changes_since_a_version() {
        let mut log = PrefixLog::new(7);
        log.apply(&[1, 2], &[]);
        let first = log.report(None);
        assert!(first.full && first.version == 2 && first.stored.len() == 2);
        log.apply(&[3, 2], &[1, 9]);
        let next = log.report(Some((7, 2)));
        assert_eq!((next.full, next.stored, next.evicted, next.version), (false, vec![3], vec![1], 4));
        assert!(log.report(Some((8, 2))).full);
        assert_eq!(log.report(Some((7, 4))).stored, Vec::<u64>::new());
    }
}
