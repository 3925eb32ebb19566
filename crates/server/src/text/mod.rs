//! Text work: tokens to text and back, templates, stop strings. Knows no HTTP and no engine.

pub mod assets;
pub mod clock;
pub mod detokenize;
pub mod gguf_vocab;
pub mod pool;
pub mod pyjson;
pub mod pymethods;
pub mod stop;
pub mod template;
pub mod tokenizer;

pub use detokenize::Detokenizer;
pub use pool::TextPool;
pub use stop::{StopMatcher, StopSet};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
