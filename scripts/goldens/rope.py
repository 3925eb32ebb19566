"""Rotary frequencies of `fixtures/configs/*.json` as transformers computes them: `fixtures/configs/inv_freq/golden.json`."""

import json
import tempfile

from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from common import FIXTURES


def main():
    golden = {}
    for path in sorted((FIXTURES / "configs").glob("*.json")):
        with tempfile.TemporaryDirectory() as tmp:
            open(f"{tmp}/config.json", "w").write(path.read_text())
            rope = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp))
        golden[path.stem] = {"inv_freq": rope.inv_freq.tolist(), "scale": rope.attention_scaling}
    out = FIXTURES / "configs" / "inv_freq" / "golden.json"
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(golden) + "\n")


if __name__ == "__main__":
    main()
