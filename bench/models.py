"""Two mixture-of-experts models of real shape with random weights, the same weights for every engine.

    python bench/models.py DIR [--only qwen3moe|deepseek2] [--no-gguf]

DIR is the folder that `cargo xtask bench engine --peers DIR` takes. It must hold `models/smollm2-hf` (the tokenizer is
taken from there) and, for the GGUF files, `models/smollm2-q8_0.gguf` and `llama.cpp/bin/llama-quantize`. Written are
`models/{qwen3moe,deepseek2}-bench-hf` (Hugging Face layout, bf16) and `models/{qwen3moe,deepseek2}-bench-{bf16,q8_0}.gguf`.
What is there already is left as it is. The DeepSeek shape has one MTP layer, in a file of its own; the GGUF files have none.

Deterministic: a matrix is drawn from N(0, std) by PCG64, seeded with the CRC-32 of its name. Needs numpy; gguf for GGUF.
"""

import argparse
import json
import shutil
import struct
import subprocess
import zlib
from pathlib import Path

import numpy as np

VOCABULARY = 49152
CONTEXT = 32768
SHAPES = {
    "qwen3moe": dict(hidden=1024, layers=24, heads=16, kv_heads=4, head=128, experts=32, top_k=4, expert=512),
    "deepseek2": dict(hidden=1024, layers=24, heads=16, q_rank=512, kv_rank=512, rope=64, nope=128, value=128, dense=1,
                      dense_width=4096, experts=32, top_k=4, expert=512),
}


def ffn(prefix, width, hidden):
    yield prefix + "gate_proj.weight", (width, hidden), "matrix"
    yield prefix + "up_proj.weight", (width, hidden), "matrix"
    yield prefix + "down_proj.weight", (hidden, width), "matrix"


def layer(family, s, index):
    """(name, shape, kind) of the tensors of one decoder layer, in the order of the forward pass."""
    hidden, heads, p = s["hidden"], s["heads"], f"model.layers.{index}."
    yield p + "input_layernorm.weight", (hidden,), "norm"
    a = p + "self_attn."
    if family == "qwen3moe":
        keys = s["kv_heads"] * s["head"]
        yield a + "q_proj.weight", (heads * s["head"], hidden), "matrix"
        yield a + "k_proj.weight", (keys, hidden), "matrix"
        yield a + "v_proj.weight", (keys, hidden), "matrix"
        yield a + "o_proj.weight", (hidden, heads * s["head"]), "matrix"
        yield a + "q_norm.weight", (s["head"],), "norm"
        yield a + "k_norm.weight", (s["head"],), "norm"
    else:
        yield a + "q_a_proj.weight", (s["q_rank"], hidden), "matrix"
        yield a + "q_a_layernorm.weight", (s["q_rank"],), "norm"
        yield a + "q_b_proj.weight", (heads * (s["nope"] + s["rope"]), s["q_rank"]), "matrix"
        yield a + "kv_a_proj_with_mqa.weight", (s["kv_rank"] + s["rope"], hidden), "matrix"
        yield a + "kv_a_layernorm.weight", (s["kv_rank"],), "norm"
        yield a + "kv_b_proj.weight", (heads * (s["nope"] + s["value"]), s["kv_rank"]), "matrix"
        yield a + "o_proj.weight", (hidden, heads * s["value"]), "matrix"
    yield p + "post_attention_layernorm.weight", (hidden,), "norm"
    if index < s.get("dense", 0):
        yield from ffn(p + "mlp.", s["dense_width"], hidden)
        return
    yield p + "mlp.gate.weight", (s["experts"], hidden), "router"
    if family == "deepseek2":
        yield p + "mlp.gate.e_score_correction_bias", (s["experts"],), "bias"
    for expert in range(s["experts"]):
        yield from ffn(f"{p}mlp.experts.{expert}.", s["expert"], hidden)
    if family == "deepseek2":
        yield from ffn(p + "mlp.shared_experts.", s["expert"], hidden)


def tensors(family, s):
    yield "model.embed_tokens.weight", (VOCABULARY, s["hidden"]), "end"
    for index in range(s["layers"]):
        yield from layer(family, s, index)
    yield "model.norm.weight", (s["hidden"],), "norm"
    yield "lm_head.weight", (VOCABULARY, s["hidden"]), "end"


def mtp_tensors(family, s):
    """The MTP layer of DeepSeek-V3, behind the last layer; embedding and head are the model's own."""
    index, hidden = s["layers"], s["hidden"]
    p = f"model.layers.{index}."
    yield p + "enorm.weight", (hidden,), "norm"
    yield p + "hnorm.weight", (hidden,), "norm"
    yield p + "eh_proj.weight", (hidden, 2 * hidden), "matrix"
    yield from layer(family, s, index)
    yield p + "shared_head.norm.weight", (hidden,), "norm"


def value(name, shape, kind):
    """f32 values of a tensor."""
    if kind == "norm":
        return np.ones(shape, np.float32)
    if kind == "bias":
        return np.zeros(shape, np.float32)
    deviation = 0.05 if kind == "end" else 1.0 / np.sqrt(shape[-1])
    if "down_proj" in name or "o_proj" in name:
        deviation *= 0.5
    draw = np.random.Generator(np.random.PCG64(zlib.crc32(name.encode())))
    return draw.standard_normal(shape, dtype=np.float32) * np.float32(deviation)


def bf16(values):
    """Bits of the nearest bf16, ties to even."""
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def config(family, s):
    common = dict(
        hidden_size=s["hidden"], num_hidden_layers=s["layers"], num_attention_heads=s["heads"], vocab_size=VOCABULARY,
        max_position_embeddings=CONTEXT, rms_norm_eps=1e-6, hidden_act="silu", tie_word_embeddings=False,
        torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2, attention_bias=False, initializer_range=0.02, use_cache=True,
        num_experts_per_tok=s["top_k"], moe_intermediate_size=s["expert"], norm_topk_prob=True)
    if family == "qwen3moe":
        return common | dict(
            architectures=["Qwen3MoeForCausalLM"], model_type="qwen3_moe", rope_theta=1e6, num_key_value_heads=s["kv_heads"],
            head_dim=s["head"], num_experts=s["experts"], intermediate_size=s["expert"] * s["top_k"], decoder_sparse_step=1,
            mlp_only_layers=[], router_aux_loss_coef=0.001, use_sliding_window=False, sliding_window=None)
    return common | dict(
        architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", rope_theta=1e4, num_key_value_heads=s["heads"],
        intermediate_size=s["dense_width"], n_routed_experts=s["experts"], n_shared_experts=1,
        first_k_dense_replace=s["dense"], moe_layer_freq=1, n_group=1, topk_group=1, topk_method="noaux_tc",
        scoring_func="sigmoid", routed_scaling_factor=2.5, q_lora_rank=s["q_rank"], kv_lora_rank=s["kv_rank"],
        qk_rope_head_dim=s["rope"], qk_nope_head_dim=s["nope"], v_head_dim=s["value"], rope_interleave=True,
        num_nextn_predict_layers=1, ep_size=1, seq_aux=True, pretraining_tp=1)


def write_safetensors(path, items):
    if path.exists():
        return
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, shape, kind in items:
        size = int(np.prod(shape)) * (4 if kind == "bias" else 2)
        header[name] = dict(dtype="F32" if kind == "bias" else "BF16", shape=list(shape),
                            data_offsets=[offset, offset + size])
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = path.with_suffix(".part")
    with open(part, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, shape, kind in items:
            values = value(name, shape, kind)
            (values if kind == "bias" else bf16(values)).tofile(file)
    part.rename(path)


def write_hf(family, s, folder, tokenizer):
    folder.mkdir(parents=True, exist_ok=True)
    files = {"model.safetensors": list(tensors(family, s))}
    if family == "deepseek2":
        files["model-mtp.safetensors"] = list(mtp_tensors(family, s))
    for name, items in files.items():
        write_safetensors(folder / name, items)
    if len(files) > 1:
        size = sum((folder / name).stat().st_size for name in files)
        places = {tensor: name for name, items in files.items() for tensor, _, _ in items}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")
    (folder / "config.json").write_text(json.dumps(config(family, s), indent=1) + "\n")
    (folder / "generation_config.json").write_text(
        json.dumps(dict(bos_token_id=1, eos_token_id=2, pad_token_id=2, do_sample=False)) + "\n")
    for file in tokenizer.iterdir():
        if "token" in file.name or file.name in ("vocab.json", "merges.txt"):
            shutil.copy(file, folder / file.name)


def gguf_tensors(family, s, names):
    """(GGUF name, shape, kind, function that makes the f32 values) of every tensor."""
    stacks = {}
    for name, shape, kind in tensors(family, s):
        # Matrices that stay f32 in the file have the values of the other engines.
        made = lambda n=name, sh=shape, k=kind: rounded(value(n, sh, k), k)
        if ".mlp.experts." in name:
            head, rest = name.split(".mlp.experts.")
            expert, part = rest.split(".", 1)
            stack = f"{head}.mlp.experts.{part}"
            stacks.setdefault(stack, []).append(made)
            if int(expert) == s["experts"] - 1:
                all_of = stacks.pop(stack)
                yield (names(stack), (len(all_of), *shape), kind, lambda a=all_of: np.stack([one() for one in a]))
        elif name.endswith("kv_b_proj.weight"):
            parts = (s["heads"], s["nope"] + s["value"], s["kv_rank"])
            keys = lambda m=made: np.ascontiguousarray(m().reshape(parts)[:, :s["nope"]].transpose(0, 2, 1))
            values = lambda m=made: np.ascontiguousarray(m().reshape(parts)[:, s["nope"]:])
            yield names(name.replace("kv_b", "k_b")), (s["heads"], s["kv_rank"], s["nope"]), kind, keys
            yield names(name.replace("kv_b", "v_b")), (s["heads"], s["value"], s["kv_rank"]), kind, values
        elif name.endswith("e_score_correction_bias"):
            yield f"blk.{name.split('.')[2]}.exp_probs_b.bias", shape, kind, made
        else:
            yield names(name), shape, kind, made


def rounded(values, kind):
    if kind in ("norm", "bias"):
        return values
    return (bf16(values).astype(np.uint32) << 16).view(np.float32)


def gguf_settings(w, family, s, gguf):
    w.add_name(f"random-{family}")
    w.add_context_length(CONTEXT)
    w.add_embedding_length(s["hidden"])
    w.add_block_count(s["layers"])
    w.add_head_count(s["heads"])
    w.add_layer_norm_rms_eps(1e-6)
    w.add_vocab_size(VOCABULARY)
    w.add_file_type(32)
    w.add_expert_count(s["experts"])
    w.add_expert_used_count(s["top_k"])
    w.add_expert_feed_forward_length(s["expert"])
    if family == "qwen3moe":
        w.add_head_count_kv(s["kv_heads"])
        w.add_key_length(s["head"])
        w.add_value_length(s["head"])
        w.add_rope_freq_base(1e6)
        w.add_rope_dimension_count(s["head"])
        w.add_feed_forward_length(s["expert"] * s["top_k"])
        return
    w.add_head_count_kv(1)
    w.add_rope_freq_base(1e4)
    w.add_feed_forward_length(s["dense_width"])
    w.add_leading_dense_block_count(s["dense"])
    w.add_q_lora_rank(s["q_rank"])
    w.add_kv_lora_rank(s["kv_rank"])
    w.add_key_length(s["kv_rank"] + s["rope"])
    w.add_value_length(s["kv_rank"])
    w.add_key_length_mla(s["nope"] + s["rope"])
    w.add_value_length_mla(s["value"])
    w.add_rope_dimension_count(s["rope"])
    w.add_expert_shared_count(1)
    w.add_expert_weights_scale(2.5)
    w.add_expert_weights_norm(True)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def copy_tokenizer(w, reader):
    texts = lambda field: [bytes(reader.fields[field].parts[i]).decode() for i in reader.fields[field].data]
    types = reader.fields["tokenizer.ggml.token_type"]
    tokens = texts("tokenizer.ggml.tokens")
    if len(tokens) != VOCABULARY:
        raise SystemExit(f"the tokenizer's file has {len(tokens)} tokens; {VOCABULARY} are needed")
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre(texts("tokenizer.ggml.pre")[0] if "tokenizer.ggml.pre" in reader.fields else "default")
    w.add_token_list(tokens)
    w.add_token_types([int(types.parts[i][0]) for i in types.data])
    w.add_token_merges(texts("tokenizer.ggml.merges"))
    w.add_bos_token_id(1)
    w.add_eos_token_id(2)
    w.add_add_bos_token(False)


def write_gguf(family, s, path, tokenizer):
    import gguf
    if path.exists():
        return
    types = gguf.GGMLQuantizationType
    part = path.with_suffix(".part")
    w = gguf.GGUFWriter(part, family)
    gguf_settings(w, family, s, gguf)
    copy_tokenizer(w, gguf.GGUFReader(tokenizer))
    known = {"qwen3moe": gguf.MODEL_ARCH.QWEN3MOE, "deepseek2": gguf.MODEL_ARCH.DEEPSEEK2}[family]
    table = gguf.get_tensor_name_map(known, s["layers"])
    items = list(gguf_tensors(family, s, lambda name: table.get_name(name, try_suffixes=(".weight", ".bias"))))
    kept = lambda kind: kind not in ("matrix", "end")
    # Names and shapes first; a model's values at once would not fit in memory.
    for name, shape, kind, _ in items:
        if kept(kind):
            w.add_tensor_info(name, shape, np.dtype(np.float32), int(np.prod(shape)) * 4, raw_dtype=types.F32)
        else:
            in_bytes = gguf.quant_shape_to_byte_shape(shape, types.BF16)
            w.add_tensor_info(name, in_bytes, np.dtype(np.uint8), int(np.prod(in_bytes)), raw_dtype=types.BF16)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_ti_data_to_file()
    for _, _, kind, make in items:
        values = make()
        w.write_tensor_data(values if kept(kind) else bf16(values).view(np.uint8))
    w.close()
    part.rename(path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("dir", type=Path)
    parser.add_argument("--only", choices=SHAPES)
    parser.add_argument("--no-gguf", action="store_true", help="write the Hugging Face directories only")
    args = parser.parse_args()
    models = args.dir / "models"
    for family, shape in SHAPES.items():
        if args.only not in (None, family):
            continue
        write_hf(family, shape, models / f"{family}-bench-hf", models / "smollm2-hf")
        if args.no_gguf:
            continue
        exact, small = models / f"{family}-bench-bf16.gguf", models / f"{family}-bench-q8_0.gguf"
        write_gguf(family, shape, exact, models / "smollm2-q8_0.gguf")
        if not small.exists():
            quantize = args.dir / "llama.cpp/bin/llama-quantize"
            subprocess.run([quantize, "--pure", exact, small, "Q8_0"], check=True)


if __name__ == "__main__":
    main()
