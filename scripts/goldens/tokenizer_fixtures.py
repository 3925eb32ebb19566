"""Tokenizer goldens: SmolLM2's own tokenizer, and small ones trained here: `fixtures/tokenizers/`.

Usage: tokenizer_fixtures.py SMOLLM2_GGUF. For each small tokenizer: `NAME.tokenizer.json`, `NAME.gguf` (metadata only) and
`NAME.json`, the golden: a list of `{text, ids, ids_special, decoded, decoded_skip}`, where `ids` has add_special_tokens=False,
`ids_special` has True (null: the same), `decoded` is of `ids` with special tokens kept, `decoded_skip` without them (null: the same).
"""

import os

os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["RAYON_NUM_THREADS"] = "1"

import json
import pathlib
import sys
import tempfile

import gguf
import sentencepiece as spm
import tokenizers
from sentencepiece import sentencepiece_model_pb2
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from common import FIXTURES
from gguf_model import DIGITS_APART, metadata, smollm2_tokenizer
from tokenizer_strings import CORPUS, STRINGS

OUT = FIXTURES / "tokenizers"
LICENSES = [pathlib.Path("/usr/share/common-licenses") / n for n in ("GPL-3", "Apache-2.0")]
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

SPLIT = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def split(digits):
    """A regex split, then bytes: Llama 3 takes up to three digits together, Qwen 2 one."""
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT.replace("DIGITS", digits)), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Name → (pre-tokenizer, control tokens, user-defined tokens, specials first, bos, eos, add_bos, NFC, ignore_merges)
BPE = {
    "llama-bpe": (split("{1,3}"), ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
                  [], False, "<|begin_of_text|>", "<|eot_id|>", True, False, True),
    "qwen2": (split(""), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], ["<tool_call>", "</tool_call>"],
              False, None, "<|im_end|>", False, True, False),
    "smollm": (DIGITS_APART, ["<|endoftext|>", "<|im_start|>", "<|im_end|>"], [], True, "<|im_start|>", "<|im_end|>", False, False, False),
}
UNREACHABLE = ["ĠKwire", "unhyphenated"]  # in the vocabulary, but no merges lead there: only `ignore_merges` finds them


def corpus():
    return [line for p in LICENSES for line in p.read_text().splitlines(keepends=True)] + CORPUS


def train_bpe(name):
    pre, control, user, first, bos, eos, add_bos, nfc, ignore_merges = BPE[name]
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = pre
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(
        vocab_size=590, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    learnt = json.loads(trained.to_str())["model"]
    pieces = sorted(learnt["vocab"], key=learnt["vocab"].get) + UNREACHABLE
    added = control + user
    tokens = added + pieces if first else pieces + added
    vocab = {t: i for i, t in enumerate(tokens)}
    # As published: specials after the model's vocabulary are only in `added_tokens`; those before it are in both.
    inner = {t: i for t, i in vocab.items() if first or t not in added}
    merges = [tuple(m) if isinstance(m, list) else tuple(m.split(" ")) for m in learnt["merges"]]
    tok = tokenizers.Tokenizer(models.BPE(inner, merges, ignore_merges=ignore_merges))
    tok.pre_tokenizer = pre
    tok.decoder = decoders.ByteLevel()
    if nfc:
        tok.normalizer = normalizers.NFC()
    for t in added:
        one = [AddedToken(t, normalized=False, special=t in control)]
        (tok.add_special_tokens if t in control else tok.add_tokens)(one)
        assert tok.token_to_id(t) == vocab[t]
    if add_bos:
        tok.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, vocab[bos])])])
    tok.save(str(OUT / f"{name}.tokenizer.json"))
    types = [CONTROL if t in control else USER_DEFINED if t in user else NORMAL for t in tokens]
    w = writer(name)
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(name)
    w.add_token_list(tokens)
    w.add_token_types(types)
    w.add_token_merges([" ".join(m) for m in merges])
    if bos:
        w.add_bos_token_id(vocab[bos])
    w.add_eos_token_id(vocab[eos])
    w.add_add_bos_token(add_bos)
    finish(w)
    write_golden(name, tok)


def writer(name):
    w = gguf.GGUFWriter(OUT / f"{name}.gguf", "llama")
    w.add_name(name)
    return w


def finish(w):
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()


def case(tok, text):
    ids, special = (tok.encode(text, add_special_tokens=s).ids for s in (False, True))
    decoded, skip = (tok.decode(ids, skip_special_tokens=s) for s in (False, True))
    return {"text": text, "ids": ids, "ids_special": None if special == ids else special,
            "decoded": decoded, "decoded_skip": None if skip == decoded else skip}


def write_cases(name, cases):
    (OUT / f"{name}.json").write_text("[\n" + ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases) + "\n]\n", encoding="utf-8")


def write_golden(name, tok, extra=lambda text, c: {}):
    cases = []
    for text in STRINGS:
        c = case(tok, text)
        cases.append(c | extra(text, c))
    write_cases(name, cases)
    lossy = [c["text"] for c in cases if c["decoded"] != c["text"]]
    print(f"{name}: {len(cases)} strings, vocabulary {tok.get_vocab_size()}, decoding differs from the text for {lossy}")


def sentencepiece_bpe():
    """Like Llama 2's: byte fallback, dummy prefix, digits apart, no normalization."""
    name = "llama-spm"
    with tempfile.TemporaryDirectory() as tmp:
        pathlib.Path(f"{tmp}/corpus.txt").write_text("".join(corpus()), encoding="utf-8")
        spm.SentencePieceTrainer.train(
            input=f"{tmp}/corpus.txt", model_prefix=f"{tmp}/m", vocab_size=600, model_type="bpe", byte_fallback=True,
            split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=True,
            allow_whitespace_only_pieces=True, character_coverage=0.9995, num_threads=1, minloglevel=2, unk_surface=" \u2047 ",
            unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
        proto = sentencepiece_model_pb2.ModelProto.FromString(pathlib.Path(f"{tmp}/m.model").read_bytes())
    proto.trainer_spec.ClearField("input")  # the temporary folder's name
    proto.trainer_spec.ClearField("model_prefix")
    model = proto.SerializeToString(deterministic=True)
    (OUT / f"{name}.model").write_bytes(model)
    sp = spm.SentencePieceProcessor(model_proto=model)
    pieces = [(p.piece, p.score, p.type) for p in proto.pieces]
    vocab = {p: i for i, (p, _, _) in enumerate(pieces)}
    merges = []
    for i, (piece, score, kind) in enumerate(pieces):
        if kind == NORMAL:
            halves = [(piece[:k], piece[k:]) for k in range(1, len(piece))]
            merges += [(-score, vocab[l], vocab[r], l, r) for l, r in halves if l in vocab and r in vocab]
    tok = tokenizers.Tokenizer(models.BPE(
        vocab, [(l, r) for *_, l, r in sorted(merges)], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tok.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tok.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    tok.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<unk>", "<s>", "</s>")])
    tok.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)])
    tok.save(str(OUT / f"{name}.tokenizer.json"))
    w = writer(name)
    w.add_tokenizer_model("llama")
    w.add_tokenizer_pre("default")
    w.add_token_list([p for p, _, _ in pieces])
    w.add_token_scores([s for _, s, _ in pieces])
    w.add_token_types([k for _, _, k in pieces])
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_unk_token_id(0)
    w.add_add_bos_token(True)
    w.add_add_eos_token(False)
    w.add_add_space_prefix(True)
    finish(w)

    def extra(text, c):
        ids = sp.encode(text)
        if ids != c["ids"]:
            print(f"  {name}: sentencepiece differs for {text!r}: {ids[:12]} {c['ids'][:12]}")
        return {"sp_ids": None if ids == c["ids"] else ids, "sp_decoded": sp.decode(ids)}

    write_golden(name, tok, extra)


def smollm2(path):
    """The published SmolLM2 tokenizer; `gguf_conversion_ids` is what transformers' GGUF conversion gives where that differs."""
    tok = smollm2_tokenizer(metadata(gguf.GGUFReader(path)))
    other = AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)

    def extra(text, c):
        assert tok(text, add_special_tokens=False).input_ids == c["ids"]
        ids = other(text, add_special_tokens=False).input_ids
        return {} if ids == c["ids"] else {"gguf_conversion_ids": ids}

    write_golden("smollm2", tok.backend_tokenizer, extra)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name in BPE:
        train_bpe(name)
    sentencepiece_bpe()
    smollm2(pathlib.Path(sys.argv[1]))


if __name__ == "__main__":
    main()
