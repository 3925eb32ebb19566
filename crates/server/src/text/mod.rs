//! Text work: tokens to text and back, templates, stop strings. Knows no HTTP, and of the engine only what a checkpoint
//! holds for the text side.

pub mod assets;
mod clock;
pub mod detokenize;
pub mod gguf_vocab;
pub mod pool;
mod pyjson;
mod pymethods;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use detokenize::Detokenizer;
pub use pool::TextPool;
pub use stop::{StopMatcher, StopSet};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
