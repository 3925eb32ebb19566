//! A step's metadata, owned, with what each token needs already looked up.

use crate::{RowSpan, StepBatch};

/// Block tables of one KV group, by slot.
pub type SlotTables = Vec<Vec<u32>>;

/// Owned copy of a [`StepBatch`].
pub struct CpuStep {
    /// Input tokens, rows one after another.
    pub token_ids: Vec<u32>,
    /// The rows.
    pub rows: Vec<RowSpan>,
    /// Row of each token.
    pub token_rows: Vec<u32>,
    /// Position of each token in its sequence.
    pub positions: Vec<u32>,
    /// `block_tables[group][row]`.
    pub block_tables: Vec<Vec<Vec<u32>>>,
    /// Tokens whose logits are wanted.
    pub logit_tokens: Vec<u32>,
}

impl CpuStep {
    /// Copies `batch` and its rows' tables out of `tables[group][slot]`, checking that rows tile the tokens.
    pub fn new(batch: &StepBatch<'_>, tables: &[SlotTables]) -> Self {
        let n_tokens = batch.token_ids.len();
        let (mut token_rows, mut positions) = (Vec::with_capacity(n_tokens), Vec::with_capacity(n_tokens));
        for (i, row) in batch.rows.iter().enumerate() {
            assert!(row.n_tokens > 0 && row.first_token == positions.len(), "rows must tile the step's tokens");
            token_rows.extend(std::iter::repeat_n(i as u32, row.n_tokens));
            positions.extend((row.first_position..row.context_len()).map(|p| p as u32));
        }
        assert_eq!(positions.len(), n_tokens, "rows must tile the step's tokens");
        assert_eq!(batch.slots.len(), batch.rows.len(), "a slot for each row");
        assert!(batch.token_ids.iter().all(|id| id & StepBatch::DRAWN == 0), "at depth 0 every input is known");
        assert!(batch.logit_tokens.iter().all(|&t| (t as usize) < n_tokens), "wanted logits of tokens of the step");
        let of_rows = |tables: &SlotTables| batch.slots.iter().map(|&slot| tables[slot as usize].clone()).collect();
        Self {
            token_ids: batch.token_ids.to_vec(),
            rows: batch.rows.to_vec(),
            token_rows,
            positions,
            block_tables: tables.iter().map(of_rows).collect(),
            logit_tokens: batch.logit_tokens.to_vec(),
        }
    }

    /// Tokens of the step.
    pub fn n_tokens(&self) -> usize {
        self.token_ids.len()
    }

    /// Block that holds `position` of `row`.
    pub fn block(&self, group: usize, row: usize, position: usize, block_len: usize) -> u32 {
        let block = self.block_tables[group][row][position / block_len];
        assert_ne!(block, StepBatch::NO_BLOCK, "position {position} of row {row} has no block");
        block
    }
}
