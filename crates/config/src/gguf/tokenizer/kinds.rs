//! Kinds of byte-level BPE, by the names that files give them (`tokenizer.ggml.pre`).
//!
//! Sources: the tokenizer.json of the models, and `llama-vocab.cpp` of the llama.cpp project for those
//! that it describes in several patterns.

use serde_json::{Value, json};

/// How a tokenizer cuts a text into words before it merges bytes.
#[derive(Debug)]
pub(super) struct Kind {
    names: &'static [&'static str],
    /// Text is composed (NFC) first.
    composed: bool,
    /// Each cuts the pieces that the one before left.
    patterns: &'static [&'static str],
    /// GPT-2's own pattern cuts last.
    gpt2: bool,
    /// Words of the vocabulary are taken whole, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Texts begin with BOS unless the file says otherwise.
    pub(super) begins: bool,
}

const PLAIN: Kind = Kind {
    names: &[],
    composed: false,
    patterns: &[],
    gpt2: false,
    ignore_merges: false,
    begins: false,
};

const KINDS: &[Kind] = &[
    Kind {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"],
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        begins: true,
        ..PLAIN
    },
    Kind {
        names: &["qwen2", "deepseek-r1-qwen"],
        composed: true,
        patterns: &[
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ..PLAIN
    },
    Kind {
        names: &["smollm"],
        patterns: &[r"\p{N}"],
        gpt2: true,
        ..PLAIN
    },
    Kind {
        names: &["gpt-2"],
        gpt2: true,
        ..PLAIN
    },
    Kind {
        names: &["default"],
        patterns: &[
            r"[\p{P}\$\+<=>\^~\|]+",
            r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
            r"\p{N}+",
            "[0-9][0-9][0-9]",
        ],
        ..PLAIN
    },
    Kind {
        names: &["deepseek-llm"],
        patterns: &[
            r"[\r\n]",
            DEEPSEEK_LETTERS,
            "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            HAN_AND_HANGUL,
            r"\p{N}+",
        ],
        ..PLAIN
    },
    Kind {
        names: &["deepseek-coder"],
        patterns: &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            HAN_AND_HANGUL,
            r"\p{N}",
        ],
        ..PLAIN
    },
    Kind {
        names: &["deepseek-v3"],
        patterns: &[
            r"\p{N}{1,3}",
            "[一-龥\u{3040}-ゟ゠-ヿ]+",
            r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##,
        ],
        ..PLAIN
    },
    Kind {
        names: &["tekken"],
        patterns: &[
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        ],
        ignore_merges: true,
        begins: true,
        ..PLAIN
    },
];

/// Letters of alphabets with case, with a blank before.
const DEEPSEEK_LETTERS: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const HAN_AND_HANGUL: &str = "[\u{4e00}-\u{9fa5}\u{800}-\u{4e00}\u{ac00}-\u{d7ff}]+";

impl Kind {
    pub(super) fn of(name: &str) -> Option<&'static Self> {
        KINDS.iter().find(|kind| kind.names.contains(&name))
    }

    /// All names, for messages.
    pub(super) fn names() -> String {
        let names: Vec<&str> = KINDS.iter().flat_map(|kind| kind.names).copied().collect();
        names.join(", ")
    }

    pub(super) fn normalizer(&self) -> Value {
        if self.composed {
            json!({"type": "NFC"})
        } else {
            Value::Null
        }
    }

    pub(super) fn pre_tokenizer(&self) -> Value {
        let mut steps: Vec<Value> = self
            .patterns
            .iter()
            .map(|pattern| {
                json!({"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": false})
            })
            .collect();
        steps.push(json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": self.gpt2,
        }));
        json!({"type": "Sequence", "pretokenizers": steps})
    }
}
