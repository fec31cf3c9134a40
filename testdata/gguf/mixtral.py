"""Makes mixtral.gguf, mixtral.json and kinds.json in this directory.

mixtral.gguf is a small Mixtral with a SentencePiece tokenizer; its expert tensors have every quantised
type. mixtral.json holds what others make of it: token ids of sentencepiece and llama.cpp (which must
agree), logits and greedy ids of transformers with the weights as the gguf package decodes them.
kinds.json holds llama.cpp's token ids for kinds of byte-level BPE, over the vocabulary of
../tokenizers/qwen.

Usage: mixtral.py LIBLLAMA (libllama.so with its libraries beside it)
Needs: sentencepiece, gguf, numpy, torch, transformers, safetensors.
"""

import ctypes
import json
import pathlib
import random
import sys
import tempfile

import gguf
import numpy as np
import sentencepiece
import torch
import transformers

HERE = pathlib.Path(__file__).parent
T = gguf.GGMLQuantizationType
HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, WIDTH, VOCAB = 256, 4, 2, 64, 3, 3, 256, 640
# Gate, up and down of each layer.
TYPES = [[T.Q4_K, T.Q6_K, T.Q8_0], [T.Q4_0, T.Q4_1, T.Q5_0], [T.F16, T.BF16, T.Q4_K]]
LINES = [
    "Grüße aus München: die Straße ist naß, aber schön.",
    "Le cœur a ses raisons que la raison ne connaît point.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "def main(argv):\n    for i in range(10):\n        print(i, argv[i])\n",
    "1 + 1 = 2, 12 + 30 = 42, 2024-11-30, 3.14159",
    "你好,世界。こんにちは世界。",
    "banana ananas aaaa aaaaaaa abababab",
]
TEXTS = [
    "", " ", "  ", "   ", "a", " a", "Hello, world!", "Hello  world ", "\n", "a\n\n\tb\r\n", "aaaaaaaaaaaaa", "abababababab banana",
    "Grüße, 你好 \U0001f600 e\u0301 \u00a0x", "The License grants you rights under the terms of this License.",
    "def f(x):\n        return x + 1\n", "12345 67", "\u2581already\u2581escaped", "<0x41> is no byte", "Съешь ещё",
    "<s>hi</s>", "[INST] say hi [/INST]hello</s> [INST]", "<unk>", "a<|end|> b", "  lead", "trail   ", "\u0000\u007f",
]


def train(dir):
    """A BPE model with the settings of Llama's."""
    licence = (HERE / "../../LICENSE").read_text().splitlines()
    corpus = dir / "corpus.txt"
    corpus.write_text("\n".join(licence + LINES * 8))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus), model_prefix=str(dir / "spm"), model_type="bpe", vocab_size=VOCAB, byte_fallback=True,
        split_digits=True, normalization_rule_name="identity", remove_extra_whitespaces=False, character_coverage=0.995,
        allow_whitespace_only_pieces=True, user_defined_symbols=["[INST]", "[/INST]"], control_symbols=["<|end|>"],
        minloglevel=2, num_threads=1,
    )
    return sentencepiece.SentencePieceProcessor(model_file=str(dir / "spm.model"))


def tokens_of(spm):
    kinds = []
    for id in range(spm.vocab_size()):
        kind = 2 if spm.is_unknown(id) else 3 if spm.is_control(id) else 6 if spm.is_byte(id) else 5 if spm.is_unused(id) else 1
        kinds.append(4 if spm.id_to_piece(id) in ("[INST]", "[/INST]") else kind)
    return [spm.id_to_piece(id) for id in range(spm.vocab_size())], [spm.get_score(id) for id in range(spm.vocab_size())], kinds


class Llama:
    """The tokenizer of llama.cpp."""

    def __init__(self, library):
        for name in ("libggml-base.so", "libggml-cpu.so", "libggml.so"):
            for path in sorted(pathlib.Path(library).parent.glob(name + "*"))[:1]:
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        self.lib = lib = ctypes.CDLL(library)
        quiet = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)(lambda *_: None)
        self.quiet = quiet
        lib.llama_log_set(quiet, None)
        lib.llama_backend_init()

    def open(self, path):
        class Params(ctypes.Structure):
            """llama_model_params, which goes by value."""

            _fields_ = [("pointers", ctypes.c_void_p * 2), ("integers", ctypes.c_int32 * 5), ("more", ctypes.c_void_p * 4),
                        ("vocab_only", ctypes.c_bool), ("flags", ctypes.c_bool * 5)]

        self.lib.llama_model_default_params.restype = Params
        self.lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Params]
        self.lib.llama_model_load_from_file.restype = ctypes.c_void_p
        params = self.lib.llama_model_default_params()
        params.vocab_only = True
        model = self.lib.llama_model_load_from_file(str(path).encode(), params)
        assert model, path
        self.lib.llama_model_get_vocab.argtypes = [ctypes.c_void_p]
        self.lib.llama_model_get_vocab.restype = ctypes.c_void_p
        return self.lib.llama_model_get_vocab(model)

    def encode(self, vocab, text, special):
        data = text.encode()
        out = (ctypes.c_int32 * (len(data) * 2 + 16))()
        self.lib.llama_tokenize.argtypes = [
            ctypes.c_void_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_void_p, ctypes.c_int32, ctypes.c_bool, ctypes.c_bool]
        count = self.lib.llama_tokenize(vocab, data, len(data), out, len(out), special, True)
        assert count >= 0
        return list(out[:count])


def random_blocks(rng, kind, rows):
    """Blocks of a K type with values of about 0.05: the gguf package reads these, but does not write them."""
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(0, 256, (rows * HIDDEN // values, size), dtype=np.uint8)
    put = lambda at, value: blocks.__setitem__((slice(None), slice(at, at + 2)), np.full(len(blocks), value, "<f2").view(np.uint8).reshape(-1, 2))
    if kind == T.Q4_K:
        put(0, 2e-4), put(2, 1.5e-3)
    else:
        put(208, 4e-5)
    return blocks.reshape(rows, -1)


def stored(rng, kind, *shape):
    """(as the file holds it, as it reads)."""
    if kind in (T.Q4_K, T.Q6_K):
        raw = random_blocks(rng, kind, int(np.prod(shape[:-1]))).reshape(*shape[:-1], -1)
    else:
        raw = gguf.quants.quantize((rng.standard_normal(shape) * 0.06).astype(np.float32), kind)
    return raw, gguf.quants.dequantize(raw, kind).astype(np.float32).reshape(shape)


def pairs(rows, heads):
    """Rows as files of the llama architecture order them."""
    return rows.reshape(heads, 2, HEAD // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def halves(rows, heads):
    return rows.reshape(heads, HEAD // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def write_model(spm, path):
    rng = np.random.default_rng(11)
    w = gguf.GGUFWriter(path, "llama")
    w.add_context_length(512), w.add_embedding_length(HIDDEN), w.add_block_count(LAYERS), w.add_feed_forward_length(WIDTH)
    w.add_head_count(HEADS), w.add_head_count_kv(KV_HEADS), w.add_rope_dimension_count(HEAD), w.add_rope_freq_base(1e6)
    w.add_layer_norm_rms_eps(1e-5), w.add_expert_count(EXPERTS), w.add_expert_used_count(2), w.add_vocab_size(VOCAB)
    texts, scores, kinds = tokens_of(spm)
    w.add_tokenizer_model("llama"), w.add_tokenizer_pre("default")
    w.add_token_list(texts), w.add_token_scores(scores), w.add_token_types(kinds)
    w.add_bos_token_id(1), w.add_eos_token_id(2), w.add_unk_token_id(0), w.add_add_bos_token(True)
    w.add_chat_template("{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}")
    state = {}

    def add(name, kind, ours, *shape, order=None):
        raw, value = stored(rng, kind, *shape)
        w.add_tensor(name, raw, raw_dtype=kind)
        state[ours] = torch.from_numpy(order(value) if order else value)

    def norm(name, ours):
        value = (1 + 0.1 * rng.standard_normal(HIDDEN)).astype(np.float32)
        w.add_tensor(name, value)
        state[ours] = torch.from_numpy(value)

    add("token_embd.weight", T.Q8_0, "model.embed_tokens.weight", VOCAB, HIDDEN)
    norm("output_norm.weight", "model.norm.weight")
    add("output.weight", T.Q6_K, "lm_head.weight", VOCAB, HIDDEN)
    for layer in range(LAYERS):
        g, h = f"blk.{layer}.", f"model.layers.{layer}."
        norm(g + "attn_norm.weight", h + "input_layernorm.weight")
        norm(g + "ffn_norm.weight", h + "post_attention_layernorm.weight")
        # Quantised after the rows were brought into pairs, so the reference reads them back into halves.
        add(g + "attn_q.weight", T.Q8_0, h + "self_attn.q_proj.weight", HEADS * HEAD, HIDDEN, order=lambda v: halves(v, HEADS).copy())
        add(g + "attn_k.weight", T.Q8_0, h + "self_attn.k_proj.weight", KV_HEADS * HEAD, HIDDEN, order=lambda v: halves(v, KV_HEADS).copy())
        add(g + "attn_v.weight", T.Q6_K, h + "self_attn.v_proj.weight", KV_HEADS * HEAD, HIDDEN)
        add(g + "attn_output.weight", T.Q8_0, h + "self_attn.o_proj.weight", HIDDEN, HEADS * HEAD)
        router = (rng.standard_normal((EXPERTS, HIDDEN)) * 0.3).astype(np.float32)
        w.add_tensor(g + "ffn_gate_inp.weight", router)
        state[h + "block_sparse_moe.gate.weight"] = torch.from_numpy(router)
        for place, (name, ours) in enumerate((("gate", "w1"), ("up", "w3"), ("down", "w2"))):
            kind = TYPES[layer][place]
            raw, value = stored(rng, kind, EXPERTS, WIDTH, HIDDEN)
            w.add_tensor(f"{g}ffn_{name}_exps.weight", raw, raw_dtype=kind)
            for expert in range(EXPERTS):
                state[f"{h}block_sparse_moe.experts.{expert}.{ours}.weight"] = torch.from_numpy(value[expert].copy())
    w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
    return state


def reference(state, dir, spm):
    from safetensors.torch import save_file

    config = {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_act": "silu", "vocab_size": VOCAB,
        "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD, "intermediate_size": WIDTH, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
        "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
        "torch_dtype": "float32", "sliding_window": None,
    }
    (dir / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in state.items()}, dir / "model.safetensors", {"format": "pt"})
    model = transformers.MixtralForCausalLM.from_pretrained(dir, dtype=torch.float32, attn_implementation="eager").eval()
    prompts = {"short": "Hello, world!", "long": "The License grants you rights. " * 6, "unicode": "Grüße, 你好"}
    out = {}
    for name, text in prompts.items():
        ids = [1] + spm.encode(text)
        with torch.no_grad():
            greedy, tokens = [], list(ids)
            for step in range(16):
                logits = model(torch.tensor([tokens])).logits[0, -1]
                if step == 0:
                    first = logits
                    top = torch.topk(logits, 2).values
                greedy.append(int(logits.argmax()))
                tokens.append(greedy[-1])
        out[name] = {"input_ids": ids, "greedy_ids": greedy, "logits": [round(float(v), 5) for v in first]}
        print(name, greedy, float(top[0] - top[1]))
    return out


def spm_ids(spm, text):
    """None where the text holds what sentencepiece itself reads otherwise: names of special tokens."""
    special = ("<s>", "</s>", "<unk>", "<|end|>", "[INST]", "[/INST]", "\u0000")
    return None if any(name in text for name in special) else spm.encode(text)


def kinds(llama, dir):
    tokenizer = json.loads((HERE / "../tokenizers/qwen/tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    texts = {id: token for token, id in vocab.items()}
    for added in tokenizer["added_tokens"]:
        texts[added["id"]] = added["content"]
    special = {added["id"]: 3 if added["special"] else 4 for added in tokenizer["added_tokens"]}
    merges = [m if isinstance(m, str) else " ".join(m) for m in tokenizer["model"]["merges"]]
    cases = [
        "Hello, world! 12345 don't  stop DON'T", "  leading and\n\n\tother  blanks \r\n", "Grüße, 你好 こんにちは, \U0001f600 ещё",
        "a+b=c <tag attr='1'/> $x^2~|y`", "x = 3.14159 + 1234567; // done.\n\n", "CamelCase snake_case HTTPServer", "\t\ttabs  \n ",
        "\u0665\u0666\u0667 \u00bd \u2167", "e.g. (see: [1], {2})...", "   ", "",
    ]
    out = {}
    names = ["llama-bpe", "qwen2", "deepseek-r1-qwen", "smollm", "gpt-2", "default", "deepseek-llm", "deepseek-coder", "deepseek-v3", "tekken"]
    for name in names:
        path = dir / "kind.gguf"
        w = gguf.GGUFWriter(path, "llama")
        w.add_context_length(64), w.add_embedding_length(32), w.add_block_count(1), w.add_feed_forward_length(32)
        w.add_head_count(1), w.add_layer_norm_rms_eps(1e-5), w.add_vocab_size(len(texts))
        w.add_tokenizer_model("gpt2"), w.add_tokenizer_pre(name)
        w.add_token_list([texts[id] for id in range(len(texts))]), w.add_token_types([special.get(id, 1) for id in range(len(texts))])
        w.add_token_merges(merges), w.add_add_bos_token(False)
        w.write_header_to_file(), w.write_kv_data_to_file(), w.write_tensors_to_file(), w.close()
        open_vocab = llama.open(path)
        out[name] = [{"text": text, "ids": llama.encode(open_vocab, text, True)} for text in cases]
    (HERE / "kinds.json").write_text(json.dumps(out, ensure_ascii=False, separators=(",", ":")) + "\n")


def main():
    llama = Llama(sys.argv[1])
    with tempfile.TemporaryDirectory() as name:
        dir = pathlib.Path(name)
        spm = train(dir)
        path = HERE / "mixtral.gguf"
        state = write_model(spm, path)
        vocab = llama.open(path)
        rng = random.Random(5)
        alphabet = "aabbn \n<>/sH\u2581é你1."
        texts = TEXTS + ["".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40))) for _ in range(60)]
        encodings = []
        for text in texts:
            ids = llama.encode(vocab, text, False)
            theirs = spm_ids(spm, text)
            if theirs is not None and theirs != ids:
                print("sentencepiece differs:", repr(text), theirs, ids)
            encodings.append({"text": text, "ids": ids, "decoded": spm.decode(ids) if theirs is not None else None})
        golden = {"encodings": encodings, "prompts": reference(state, dir, spm)}
        (HERE / "mixtral.json").write_text(json.dumps(golden, ensure_ascii=False, separators=(",", ":")) + "\n")
        kinds(llama, dir)


if __name__ == "__main__":
    main()
