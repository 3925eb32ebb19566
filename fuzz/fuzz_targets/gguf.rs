//! A GGUF file: open it, use everything in it, build its tokenizer.
#![no_main]

use kwire_engine::model::checkpoint::{Checkpoint, TokenizerSource};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(checkpoint) = Checkpoint::from_gguf_bytes("fuzz.gguf", bytes.to_vec()) else { return };
    for name in checkpoint.names() {
        assert_eq!(checkpoint.read(name).unwrap().len(), checkpoint.info(name).unwrap().bytes);
    }
    let _ = checkpoint.family();
    if let Ok(text) = checkpoint.text()
        && let TokenizerSource::Gguf(vocab) = text.tokenizer
        && let Ok(tokenizer) = kwire_server::text::gguf_vocab::tokenizer(&vocab)
    {
        let _ = tokenizer.encode("Hello, world! 123\n", true);
    }
});
