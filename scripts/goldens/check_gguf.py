"""Cross-check: transformers' own GGUF loader (needs `accelerate`) against the GGUF goldens, which `gguf_model.py` loaded."""

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common import FIXTURES


def main():
    folder = FIXTURES / "gguf"
    for path in sorted(folder.glob("*.gguf")):
        golden = load_file(folder / path.name.replace("-v2", "").replace(".gguf", ".golden.safetensors"))
        model = AutoModelForCausalLM.from_pretrained(
            str(folder), gguf_file=path.name, dtype=torch.float32, attn_implementation="eager").eval()
        diff = (model(input_ids=golden["tokens"][None].long()).logits[0] - golden["logits"]).abs().max().item()
        print(f"{path.name}: {diff:.2g}")
        assert diff < 1e-3, path.name


if __name__ == "__main__":
    main()
