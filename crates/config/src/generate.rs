use crate::flag::{count, count_in, tokens_in, whole};
use crate::ranges::{
    BLOCK_SIZE, DP, MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS, MAX_OUTPUT_TOKENS, THREADS,
};
use crate::serve::one;
use crate::{Dtype, LogFormat, Quantization};
use clap::{Args, ValueEnum};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;

/// Form of prompts or results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum LineFormat {
    /// Prompts: one per line. Results: the text of each, one after the other.
    Text,
    /// Prompts: per line a JSON string, or an object as the body of `/v1/completions` or
    /// `/v1/chat/completions`. Results: one JSON object per line.
    Jsonl,
}

/// Prompts from a file through the native engine, without HTTP: `twinfer generate MODEL`.
#[derive(Clone, Debug, PartialEq, Args, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct GenerateConfig {
    /// Hugging Face model directory (config.json, safetensors, tokenizer.json), or a GGUF file.
    #[arg(value_name = "MODEL")]
    pub model: PathBuf,

    /// File of prompts; `-` reads standard input.
    #[arg(long, value_name = "FILE")]
    pub prompts: PathBuf,

    /// Form of the prompts; `jsonl` if the file's name ends so, else `text`.
    #[arg(long, value_enum)]
    pub input: Option<LineFormat>,

    /// Form of the results; as the prompts if absent.
    #[arg(long, value_enum)]
    pub output: Option<LineFormat>,

    /// Each plain prompt is a question in a chat: the model's chat template is put around it.
    #[arg(long)]
    #[serde(default)]
    pub chat: bool,

    /// Most output tokens of a prompt that says nothing else; what the context has room for if that is
    /// less.
    #[arg(long, default_value_t = 128, value_parser = tokens_in(MAX_OUTPUT_TOKENS))]
    pub max_tokens: u32,

    /// Temperature of a prompt that says nothing else; 0 is greedy.
    #[arg(long, default_value_t = 0.0)]
    pub temperature: f32,

    /// Probability mass kept, above 0 and up to 1.
    #[arg(long, default_value_t = 1.0)]
    pub top_p: f32,

    /// Tokens kept; 0 keeps all.
    #[arg(long, default_value_t = 0)]
    pub top_k: u32,

    /// Seed of the random numbers.
    #[arg(long, default_value_t = 0, value_parser = whole)]
    pub seed: u64,

    /// Do not stop at the end of the sequence.
    #[arg(long)]
    #[serde(default)]
    pub ignore_eos: bool,

    /// Compute and KV type.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub dtype: Dtype,

    /// Quantise plain weights while loading. Checkpoints that are quantised already are served as their
    /// files say.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub quantization: Quantization,

    /// Longest input and output together, in tokens; the model's own limit if absent.
    #[arg(long, value_parser = tokens_in(MAX_MODEL_LEN))]
    pub max_model_len: Option<u32>,

    /// Sequences that run at the same time.
    #[arg(long, default_value_t = 32, value_parser = count_in(MAX_NUM_SEQS))]
    pub max_num_seqs: u32,

    /// Tokens of one step: prompts longer than this are computed in chunks.
    #[arg(long, default_value_t = 512, value_parser = count_in(MAX_NUM_BATCHED_TOKENS))]
    pub max_num_batched_tokens: u32,

    /// Tokens per KV block.
    #[arg(long, default_value_t = 16, value_parser = count_in(BLOCK_SIZE))]
    pub block_size: u32,

    /// Ranks: engines with their own scheduler and KV that step together, each with its share of the threads and of the
    /// experts. Limits of sequences and tokens are those of each rank. The token ids are those of one rank.
    #[arg(long, alias = "data-parallel-size", default_value_t = 1, value_parser = count_in(DP))]
    #[serde(default = "one")]
    #[schemars(range(min = *DP.start(), max = *DP.end()))]
    pub dp: u32,

    /// Memory for KV of each rank, such as `512MiB` or `4GiB`; a quarter of what is available over all ranks if absent.
    #[arg(long)]
    pub kv_cache_memory: Option<String>,

    /// Compute threads, 1 to 1024; one per permitted core if absent.
    #[arg(long, value_parser = count(THREADS))]
    pub threads: Option<u32>,

    /// Cores to run on, such as `0-3,8`; those permitted to the process if absent. Named cores are taken to be this
    /// process's own: its compute threads keep to one each and spin up to 20 microseconds for work before they park.
    #[arg(long)]
    pub cpus: Option<String>,

    /// Instruction set of the kernels: `avx512`, `avx2` or `portable`; else the environment variable
    /// TWINFER_ISA; else the fastest that the processor has. All give the same answers.
    #[arg(long, env = "TWINFER_ISA", hide_env = true)]
    pub isa: Option<String>,

    /// Form of log lines.
    #[arg(long, value_enum, default_value_t)]
    #[serde(default)]
    pub log_format: LogFormat,
}
