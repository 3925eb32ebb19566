//! Text work: everything between prompt text and token ids.

pub mod gguf_vocab;
