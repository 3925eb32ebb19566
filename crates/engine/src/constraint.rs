//! The hook for structured output: which tokens a sequence may draw next.

use kwire_kernels::TokenMask;

/// A grammar's state along one sequence. Lives outside the engine; evaluated while the forward runs.
pub trait Constraint: Send {
    /// Tokens allowed at the next position; `None`: all.
    fn mask(&mut self) -> Option<TokenMask>;
    /// Takes the token that was drawn. `Err` names why the grammar cannot go on; it fails the sequence.
    fn accept(&mut self, token: u32) -> Result<(), String>;
    /// Whether the text may end here (a stop token is then allowed).
    fn may_end(&self) -> bool;
    /// The same state for another sequence of the request (`n > 1`).
    fn fork(&self) -> Box<dyn Constraint>;
}
