//! Block formats against golden values made by gguf-py: the reference dequantization and packed rows, bit for bit.

use kwire_kernels::cpu::Pool;
use kwire_kernels::dequantize::dequantize;
use kwire_kernels::linear::PackedWeight;
use kwire_kernels::{DType, WeightPart};
use safetensors::SafeTensors;

const NAMES: [(&str, DType); 10] = [
    ("F16", DType::F16),
    ("BF16", DType::Bf16),
    ("Q4_0", DType::Q4_0),
    ("Q4_1", DType::Q4_1),
    ("Q5_0", DType::Q5_0),
    ("Q5_1", DType::Q5_1),
    ("Q8_0", DType::Q8_0),
    ("Q4_K", DType::Q4K),
    ("Q5_K", DType::Q5K),
    ("Q6_K", DType::Q6K),
];

#[test]
fn golden_blocks_dequantize_bit_for_bit() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fixtures/gguf/blocks.safetensors");
    let bytes = std::fs::read(path).expect("the fixture is in the repository");
    let file = SafeTensors::deserialize(&bytes).expect("a safetensors file");
    let mut pool = Pool::new(1);
    for (name, dtype) in NAMES {
        let raw = file.tensor(&format!("{name}.raw")).expect(name);
        let golden = file.tensor(&format!("{name}.f32")).expect(name);
        let [n_rows, n_cols] = *golden.shape() else { panic!("{name}: a matrix") };
        let golden: Vec<f32> = golden.data().as_chunks::<4>().0.iter().map(|v| f32::from_le_bytes(*v)).collect();
        let data = raw.data();
        let w = PackedWeight::new(&mut pool, &[WeightPart { dtype, n_rows, n_cols, data, bias: None }]).expect(name);
        let mut row = vec![0.0; n_cols];
        for (r, golden) in golden.chunks_exact(n_cols).enumerate() {
            dequantize(dtype, &data[r * data.len() / n_rows..][..data.len() / n_rows], &mut row);
            assert_eq!(row, golden, "{name} row {r}");
            w.row_f32(r, &mut row);
            assert_eq!(row, golden, "{name} row {r}, packed");
        }
    }
}
