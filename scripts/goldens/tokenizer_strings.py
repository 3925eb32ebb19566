"""The strings that every tokenizer golden encodes."""

STRINGS = [
    "", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", " \n ", "\n \n  \n", "\r", "\r\n\r\n  x\r\n", "a", "A", " a", "a ", " a ",
    "Hello, world!", "  Hello   world  ", "Hello\tworld\t\tagain", "hello hello Hello HELLO hELLO",
    "The quick brown fox jumps over the lazy dog.",
    "Everyone is permitted to copy and distribute verbatim copies of this license document.",
    "don't I'll they've we're it's I'm he'd", "DON'T I'LL THEY'VE WE'RE IT'S I'M HE'D", "don\u2019t I\u2019ll", "'s 't ''ll '", "x'\u017f y'S",
    "0", "7", "42", "123", "1234", "12345", "1234567890", "3.14159", "1,000,000.50", "2024-07-26T12:34:56Z", "v1.2.3-rc.4", "x86_64",
    "a1b2c3", "  5", " 5", "   123", "\n7", "½ ¼ ²³ Ⅳ ⅻ", "٣٤٥ १२३ 123 𝟘𝟙", "0x1F 1e-10 -5 +3", "$9.99 €5 ¥300 50%",
    "def f(x):\n    return x + 1\n", "def g(a, b=None):\n\tif a:\n\t\tpass\n\n\n\treturn {'k': [1, 2], \"s\": f\"{a!r}\"}\n",
    "for (int i = 0; i < n; ++i) { sum += a[i] * b[i]; }  // dot product\r\n", "fn main() { println!(\"{:?}\", vec![1u8; 4]); }",
    "SELECT * FROM t WHERE a <> 'b' AND c >= 10;", "<div class=\"x\">&nbsp;</div>", "{\"a\": [1, 2.5, null], \"b\": {\"c\": \"\\n\"}}",
    "https://example.com/path?q=1&r=a%20b#frag", "user@example.com", "snake_case camelCase PascalCase kebab-case SCREAMING_CASE",
    "C:\\Users\\x\\y.txt", "/usr/share/common-licenses/GPL-3", "!!!???...;;;---===+++", "(((nested) [brackets] {everywhere}))",
    "...\n\n...", "end.\nNext", "end.  Next", "word!\n\n\nword", "===\r\n---", " !\n", "a\u00a0b", "a\u3000b", "a\u2003b\u2028c\u2029d\u0085e", "a\u200bb\u200db\ufeffc",
    "héllo wörld ñandú façade", "e\u0301 n\u0303 u\u0308 a\u030a", "\u0301\u0301 x\u0301\u0302\u0303", "\u212b \u00c5 \u2126 \u03a9 \ufb01 \ufb00", "ÀÉÎÕÜ àéîõü ßẞ ĳ",
    "你好，世界！", "今日は良い天気ですね。", "カタカナ ひらがな 漢字 ｶﾅ", "안녕하세요 세계", "안녕", "Привет, мир! Съешь ещё", "Γειά σου Κόσμε",
    "مرحبا بالعالم", "שלום עולם", "สวัสดีชาวโลก", "नमस्ते दुनिया", "Tiếng Việt có dấu", "混合 mixed テキスト text 123 и ещё",
    "😀", "😀😀", "👍🏽 👩‍💻 👨‍👩‍👧‍👦 🏳️‍🌈 🇫🇷🇩🇪", "❤️ ☎️ ©️ 1️⃣", "a😀b 😀 c", "∑∫√∞ ≤≥≠ ∂x/∂y → ∀ε>0", "𝓗𝓮𝓵𝓵𝓸 𝕎𝕠𝕣𝕝𝕕",
    "\u2581", "\u2581a\u2581 b", "\u0120\u010a\u00c4", "\x00", "a\x00b\x01\x7f\x80", "\ufffd\ue000\U0010ffff",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>", "<|im_end|><|im_end|>", " <|im_end|> ", "x<|endoftext|>y",
    "<|im_start|", "<|im_start |>", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>", "<s>[INST] Hi [/INST] Hello</s>",
    "a<s>b</s> c", "<unk> <s> </s>", "<0x41><0x0A>", "<tool_call>\n{\"name\": \"f\"}\n</tool_call>", " <tool_call> x", "[INST]",
    "Kwire General Public License", " Kwire", "unhyphenated", "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa", "a" * 300, "supercalifragilisticexpialidocious" * 8,
    " " * 50, " " * 33 + "x", "\n" * 20, "\t" * 9 + "x", " \t \t x", "-" * 70, "=" * 17 + " " * 17, "ab" * 60, "\n    \n        \n    x", "x \n\n y",
    "In the beginning the Universe was created.\nThis has made a lot of people very angry and been widely regarded as a bad move.",
]
assert len(set(STRINGS)) == len(STRINGS)

# Besides the licences, so that the small tokenizers also learn merges inside multi-byte characters.
CORPUS = [
    "Übergrößenträger fahren über die Brücke. L'été dernier, la forêt était très sèche. El niño comió piñas en la montaña.",
    "Привет, мир! Как дела? Это простой текст для обучения. 你好，世界！今天天气很好。今日は良い天気です。こんにちは世界。",
    "def main():\n    for i in range(10):\n        print(i)\n\n    return 0\n\n\nif __name__ == '__main__':\n    main()\n",
    "It's what they've said: don't, won't, can't, I'll, we're, he'd, I'm. 😀😀👍 12 345 6789 2024 1999 100 1000\n\n\n",
] * 12
