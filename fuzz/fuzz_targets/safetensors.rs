//! A safetensors file: what is accepted adds up to the file.
#![no_main]

use kwire_engine::model::checkpoint::Checkpoint;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(tensors) = Checkpoint::check_safetensors_bytes("fuzz.safetensors", bytes) {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        assert_eq!(tensors.iter().map(|(_, info)| info.bytes).sum::<usize>(), bytes.len() - 8 - header);
    }
});
