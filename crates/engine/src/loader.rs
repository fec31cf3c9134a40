//! From a model directory to an executor: check everything, then read the weights.

mod files;
mod seats;

use crate::core::{max_logits_rows, most_score_bytes};
use crate::eplb::EplbOptions;
use crate::exchange::RankLink;
use crate::executor::CpuExecutor;
use crate::model::{Builder, Decoder, MODEL_REVISION, Packing, Seating, Spread};
use crate::sharing::{self, Claim, PackLock, Patience, SHARED_NAME, Segment, Sharing, shared_room};
use crate::weights::{Checkpoint, WeightsError};
use crate::{KvGeometry, MAX_DRAFTS};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;
use twinfer_config::model::{
    KvBudget, KvShape, MemoryError, ModelBytes, ModelConfigError, StepSize, TensorSpecs,
};
use twinfer_config::ranges::THREADS;
use twinfer_config::{Dtype, ModelConfig, MoeComm};
use twinfer_kernels::{Compute, Isa, KernelError, ThreadTeam, numerics_class};
use twinfer_protocol::Fingerprint;
use twinfer_sys::{BlockArena, Pieces};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

use files::ModelFiles;
pub use files::model_texts;
use seats::{SeatBytes, exchange_bytes, seating, spread};

/// Version of what a KV unit holds: `block_size` rows, token-major. With latent attention a row is
/// `[latent | key]`, the key rotated in interleaved pairs; with grouped queries it is `[keys of all heads |
/// values of all heads]`, keys rotated in halves.
pub const KV_LAYOUT: u32 = 1;

/// How long a thread on a core of its own waits for work before it parks.
const SPIN: Duration = Duration::from_micros(20);

/// Is told, from any thread, how many bytes of weights of how many have been read.
pub type Progress<'a> = &'a (dyn Fn(u64, u64) + Sync);

/// How a model is to be loaded.
#[derive(Clone)]
pub struct LoadOptions<'a> {
    /// KV type.
    pub dtype: Dtype,
    /// Quantise linear layers and head to int8 while loading; those that the files hold in int8 stay as
    /// they are.
    pub quantize: bool,
    /// Load the MTP layer, to propose tokens with.
    pub mtp: bool,
    /// Most drafts of a sequence in a step, for the size of the workspace; only counted with `mtp`.
    pub max_drafts: usize,
    /// Compute threads, also used for reading.
    pub threads: usize,
    /// Cores for them; thread i runs on core `i mod len`. The thread that calls the executor is thread
    /// 0 and is pinned at its first step. Named cores are taken to be this model's own: threads that
    /// wait for work spin on them for up to 20 microseconds before they park. Without cores, or with
    /// more threads than cores, they park at once.
    pub cpus: Option<Vec<usize>>,
    /// `avx512`, `avx2` or `portable`; the best there is if absent.
    pub isa: Option<String>,
    /// Tokens per KV block.
    pub block_size: usize,
    /// Memory for KV.
    pub kv: KvMemory,
    /// Longest sequence that will be served; the model's limit if absent. More than that is an error.
    pub max_model_len: Option<usize>,
    /// Tokens of one step, for the size of the workspace.
    pub max_num_batched_tokens: usize,
    /// Sequences of one step, for the size of the workspace and of useful KV.
    pub max_num_seqs: usize,
    /// Hash of tokenizer and chat template, for the fingerprint.
    pub tokenizer_hash: String,
    /// Bytes that whoever serves the model needs beside it, planned with the workspace.
    pub beside: u64,
    /// Share packed weights with other instances that name the same directory, usually
    /// [`crate::default_share_dir`]: those of the first are mapped by all. None: they are this process's own.
    pub share: Option<PathBuf>,
    /// The other ranks of the instance: the experts are spread over all, and this one reads only its own. Every rank
    /// loads with equal options; each step of the executor is then one of all ranks. Packed weights are not shared.
    pub ranks: Option<Arc<RankLink>>,
    /// How rows come to the experts of other ranks; only counted with `ranks`.
    pub moe_comm: MoeComm,
    /// How experts move between ranks; only counted with `ranks`.
    pub eplb: EplbOptions,
    /// Progress of reading, or of the instance that packs what this one will share.
    pub progress: Option<Progress<'a>>,
}

/// Memory for KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum KvMemory {
    /// So many blocks.
    Blocks(u32),
    /// So many bytes; refused if they are not available.
    Bytes(u64),
    /// This part, in (0, 1], of what is available after weights and workspace, but not more than
    /// `max_num_seqs` sequences of `max_model_len` can use.
    Share(f64),
}

/// What the config says of a model, and what options make of it.
#[derive(Debug)]
pub struct ModelOutline {
    /// Model.
    pub config: ModelConfig,
    /// Longest sequence that will be served.
    pub max_model_len: usize,
    /// KV, with that of the MTP layer if it is loaded.
    pub kv: KvShape,
    /// Instruction set that the kernels will use.
    pub isa: Isa,
}

/// What was found before any weight is read.
#[derive(Debug)]
pub struct CheckedModel {
    /// Model.
    pub config: ModelConfig,
    /// Longest sequence that will be served.
    pub max_model_len: usize,
    /// Tokens that a sequence may have: as many of these as KV has room for.
    pub max_len: usize,
    /// Bytes of weights in memory.
    pub weight_bytes: u64,
    /// Bytes of them that another instance has packed already.
    pub shared_bytes: u64,
    /// Bytes of weights to be read from files.
    pub file_bytes: u64,
    /// Bytes of the largest step's buffers, of log-probabilities of prompts, of rows and outputs of other ranks, and of
    /// experts on their way.
    pub workspace_bytes: u64,
    /// Bytes that packing the weights takes for a while, before there are workspace and KV.
    pub loading_bytes: u64,
    /// KV blocks.
    pub num_blocks: u32,
    /// Bytes of them.
    pub kv_bytes: u64,
    /// Bytes available to this process when it was checked.
    pub available_bytes: u64,
    /// Worth telling: ignored fields, tensors, files.
    pub warnings: Vec<String>,
    /// Instruction set that the kernels will use.
    pub isa: Isa,
    checkpoint: Checkpoint,
    spread: Option<Spread>,
    seating: Option<Seating>,
    key: String,
    claim: Option<Claim>,
}

/// A model ready to run.
#[derive(Debug)]
pub struct LoadedModel {
    /// Runs it.
    pub executor: CpuExecutor,
    /// Model.
    pub config: ModelConfig,
    /// Longest sequence that will be served.
    pub max_model_len: usize,
    /// What must be equal for KV or text to be exchanged.
    pub fingerprint: Fingerprint,
    /// KV blocks of the executor's arena.
    pub num_blocks: u32,
    /// Bytes of KV.
    pub kv_bytes: u64,
    /// Bytes of weights in memory.
    pub weight_bytes: u64,
    /// Whether packed weights are shared.
    pub sharing: Sharing,
    /// As in [`CheckedModel`].
    pub warnings: Vec<String>,
}

/// Why a model was not loaded.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// config.json was refused.
    #[error("{}: {source}", path.display())]
    Config {
        /// File.
        path: PathBuf,
        /// Why.
        source: ModelConfigError,
    },
    /// Weight files were refused.
    #[error(transparent)]
    Weights(#[from] WeightsError),
    /// Memory does not suffice.
    #[error(transparent)]
    Memory(#[from] MemoryError),
    /// An option is out of range.
    #[error("{field} is {value}; allowed: {allowed}")]
    Option {
        /// Flag.
        field: &'static str,
        /// Value.
        value: String,
        /// Allowed.
        allowed: String,
    },
    /// Memory, threads or cores could not be had.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// Why.
        source: std::io::Error,
    },
    /// A kernel refused a shape: config and kernels disagree.
    #[error("weights do not suit the kernels: {0}")]
    Kernel(KernelError),
    /// Shared weights lack something that this program would have put there.
    #[error("weights that another instance packed cannot be used: {0}")]
    Shared(String),
    /// The ranks of the instance do not fit the model, or each other.
    #[error("ranks: {0}")]
    Ranks(String),
    /// Loading ended early because another part failed.
    #[error("loading was stopped")]
    Stopped,
}

impl Default for LoadOptions<'_> {
    fn default() -> Self {
        Self {
            dtype: Dtype::Bf16,
            quantize: false,
            mtp: false,
            max_drafts: MAX_DRAFTS,
            threads: 1,
            cpus: None,
            isa: None,
            block_size: 16,
            kv: KvMemory::Share(0.25),
            max_model_len: None,
            max_num_batched_tokens: 512,
            max_num_seqs: 32,
            tokenizer_hash: String::new(),
            share: None,
            beside: 0,
            ranks: None,
            moe_comm: MoeComm::AllToAll,
            eplb: EplbOptions::default(),
            progress: None,
        }
    }
}

/// Checks everything that can be checked before weights are read: options, config.json, files, sizes,
/// shapes, memory. Takes milliseconds; but if weights are shared and another instance packs them just now, it waits for
/// that one, and if nobody has them, others wait until the result is loaded or dropped.
///
/// # Errors
/// See [`ModelError`]; each names the field or file, what was found and what is allowed.
pub fn check(dir: &Path, options: &LoadOptions<'_>) -> Result<CheckedModel, ModelError> {
    let files = ModelFiles::find(dir)?;
    let ModelOutline {
        config,
        max_model_len,
        kv,
        isa,
    } = files.outline(dir, options)?;
    let specs = config.tensors(options.mtp);
    let checkpoint = match &files {
        ModelFiles::Directory => Checkpoint::open(dir, &specs, config.quantization.as_ref())?,
        ModelFiles::Gguf(gguf) => Checkpoint::open_gguf(gguf, &specs)?,
    };

    let packing = packing(options, &checkpoint);
    packing.check(&specs)?;
    let spread = spread(&config, options)?;
    let seating = match &spread {
        Some(spread) => seating(&config, spread, options)?,
        None => None,
    };
    let seats = match &spread {
        Some(spread) => SeatBytes::of(packing, &config, &specs, &checkpoint, spread, options)?,
        None => SeatBytes::default(),
    };
    let file_bytes = checkpoint.bytes();
    let (specs, file_bytes) = match &spread {
        None => (specs, file_bytes),
        Some(spread) => own_share(specs, &checkpoint, spread),
    };
    let weight_bytes = packing
        .bytes(&config, &specs, &checkpoint)
        .and_then(|bytes| bytes.checked_add(seats.redundant))
        .ok_or_else(|| ModelError::Option {
            field: "the model",
            value: "larger than memory can be".to_owned(),
            allowed: "less than 2^63 bytes".to_owned(),
        })?;
    let (key, claim) = match &options.share {
        Some(_) if options.ranks.is_some() => {
            let reason = "packed weights of a rank among others are its own".to_owned();
            (String::new(), Some(Claim::Private(reason)))
        }
        Some(dir) => claim_shared(dir, &config, &checkpoint, options),
        None => (String::new(), None),
    };
    let shared_bytes = match &claim {
        Some(Claim::Ready(_)) => weight_bytes,
        _ => 0,
    };
    let workspace_bytes = config
        .workspace_bytes(&step_size(&config, options))
        .saturating_add(most_score_bytes(max_model_len, options.max_num_seqs))
        .saturating_add(seats.moving)
        .saturating_add(
            spread
                .as_ref()
                .map_or(0, |spread| exchange_bytes(&config, spread)),
        )
        .saturating_add(options.beside);
    let loading_bytes = match shared_bytes {
        0 => packing.loading_bytes(&specs, &checkpoint, options.threads),
        _ => 0,
    };
    let available_bytes = twinfer_sys::available_memory().map_err(|source| ModelError::System {
        what: "find out how much memory is available",
        source,
    })?;
    let budget = match options.kv {
        KvMemory::Blocks(blocks) => {
            KvBudget::Bytes(u64::from(blocks).saturating_mul(kv.block_bytes()))
        }
        KvMemory::Bytes(bytes) => KvBudget::Bytes(bytes),
        KvMemory::Share(part) => KvBudget::Share {
            part,
            useful: kv
                .bytes_for(max_model_len)
                .saturating_mul(options.max_num_seqs as u64),
        },
    };
    let bytes = ModelBytes {
        weights: weight_bytes - shared_bytes,
        workspace: workspace_bytes,
        loading: loading_bytes,
    };
    let num_blocks = kv.plan(budget, available_bytes, bytes)?;

    let mut warnings = Vec::new();
    if !config.unread.is_empty() {
        warnings.push(format!(
            "config.json: fields that are not read: {}",
            config.unread.join(", ")
        ));
    }
    warnings.extend(checkpoint.warnings.iter().cloned());
    Ok(CheckedModel {
        kv_bytes: u64::from(num_blocks) * kv.block_bytes(),
        max_len: max_model_len.min(num_blocks as usize * options.block_size),
        config,
        max_model_len,
        weight_bytes,
        shared_bytes,
        file_bytes,
        workspace_bytes,
        loading_bytes,
        num_blocks,
        available_bytes,
        warnings,
        checkpoint,
        spread,
        seating,
        key,
        claim,
        isa,
    })
}

/// The part of [`check`] that needs the model's config only: no weight file is opened.
///
/// # Errors
/// The config cannot be read, or an option does not fit it or this machine.
pub fn outline(path: &Path, options: &LoadOptions<'_>) -> Result<ModelOutline, ModelError> {
    ModelFiles::find(path)?.outline(path, options)
}

/// Checks, then reads the weights and makes the executor.
///
/// # Errors
/// As [`check`]; also files that change or fail while they are read.
pub fn load(dir: &Path, options: &LoadOptions<'_>) -> Result<LoadedModel, ModelError> {
    check(dir, options)?.load(options)
}

impl CheckedModel {
    /// Bytes that this process will take: of weights, workspace and KV, or while it loads.
    pub fn needed_bytes(&self) -> u64 {
        let weights = self.weight_bytes.saturating_sub(self.shared_bytes);
        let serving = self.workspace_bytes.saturating_add(self.kv_bytes);
        weights.saturating_add(serving.max(self.loading_bytes))
    }

    /// Reads the weights and makes the executor. `options` are those of the check.
    ///
    /// # Errors
    /// A file fails or changes while it is read; memory, threads or cores cannot be had.
    pub fn load(mut self, options: &LoadOptions<'_>) -> Result<LoadedModel, ModelError> {
        let system = |what| move |source| ModelError::System { what, source };
        let claim = self.claim.take();
        let (loaded, sharing) = match claim {
            None => (self.pack(options)?, Sharing::Off),
            Some(Claim::Private(reason)) => (self.pack(options)?, Sharing::Private(reason)),
            Some(Claim::Ready(segment)) => {
                if let Some(progress) = options.progress {
                    progress(self.file_bytes, self.file_bytes);
                }
                (self.map(options, segment)?, Sharing::Mapped)
            }
            Some(Claim::Pack(lock)) => self.pack_shared(options, lock)?,
        };
        let Weights {
            model,
            hash,
            warning,
        } = loaded;
        let mut warnings = self.warnings;
        warnings.extend(warning);

        let kv = kv_shape(&self.config, options);
        let arena = BlockArena::new(self.num_blocks, kv.layers, kv.unit_bytes())
            .map_err(system("reserve memory for KV"))?;
        let cpus = options.cpus.as_deref();
        let own = cpus.is_some_and(|cpus| options.threads <= cpus.len());
        let spin = if own { SPIN } else { Duration::ZERO };
        let team = ThreadTeam::with_spin(options.threads, cpus, self.isa, spin)
            .map_err(system("start compute threads"))?;
        let geometry = KvGeometry {
            layers: kv.layers,
            width: kv.width,
            value_bytes: kv.value_bytes,
            block_size: kv.block_size,
        };
        let quantization = if options.quantize && !self.checkpoint.has_int8() {
            match self.checkpoint.format().name() {
                "none" => "w8a8".to_owned(),
                stored => format!("{stored}+w8a8"),
            }
        } else {
            self.checkpoint.format().name().to_owned()
        };
        let schemes = self.checkpoint.schemes();
        let quantization = match schemes.is_empty() {
            true => quantization,
            false => format!("{quantization}-{:016x}", xxh3_64(schemes.as_bytes())),
        };
        let fingerprint = fingerprint(&self.config, hash, quantization, options);
        let mut executor = CpuExecutor::new(
            model,
            team,
            cpus.and_then(|cpus| cpus.first().copied()),
            Arc::new(arena),
            geometry,
            self.config.vocab_size,
            self.config.context,
        );
        if options.ranks.is_some() {
            executor.set_draft_rounds(if options.mtp {
                options.max_drafts.max(1)
            } else {
                0
            });
        }
        if let (Some(seating), Some(moe)) = (self.seating, &self.config.moe) {
            executor.set_seating(seating, moe.experts);
        }
        Ok(LoadedModel {
            executor,
            max_model_len: self.max_model_len,
            fingerprint,
            num_blocks: self.num_blocks,
            kv_bytes: self.kv_bytes,
            weight_bytes: self.weight_bytes,
            sharing,
            warnings,
            config: self.config,
        })
    }
}

/// A model's weights, ready to compute with.
struct Weights {
    model: Decoder,
    /// Of the files' bytes.
    hash: String,
    warning: Option<String>,
}

impl CheckedModel {
    /// Packs weights for this process alone.
    fn pack(&self, options: &LoadOptions<'_>) -> Result<Weights, ModelError> {
        let memory = Pieces::private(self.room()).map_err(|source| ModelError::System {
            what: "reserve memory for weights",
            source,
        })?;
        let packing = packing(options, &self.checkpoint);
        let builder = Builder::new(&self.checkpoint, packing, memory, options.progress)
            .with_spread(self.spread.clone());
        self.build(&builder, options)
    }

    /// Packs weights where others find them; for this process alone where that cannot be.
    fn pack_shared(
        &self,
        options: &LoadOptions<'_>,
        lock: PackLock,
    ) -> Result<(Weights, Sharing), ModelError> {
        let pieces =
            self.checkpoint.tensors() + 2 * self.config.attention.heads() * self.config.layers;
        let memory = match Pieces::shared(SHARED_NAME, shared_room(self.room(), pieces)) {
            Ok(memory) => memory,
            Err(error) => {
                drop(lock);
                return Ok((self.pack(options)?, Sharing::Private(error.to_string())));
            }
        };
        let beats = AtomicU64::new(0);
        let beat = |done, total| lock.progress(done, total, beats.fetch_add(1, Ordering::Relaxed));
        let progress = |done, total| {
            beat(done, total);
            if let Some(progress) = options.progress {
                progress(done, total);
            }
        };
        let packing = packing(options, &self.checkpoint);
        let builder = Builder::recorded(&self.checkpoint, packing, memory, Some(&progress));
        let built = self.build(&builder, options)?;
        let private = |built, reason: &str| Ok((built, Sharing::Private(reason.to_owned())));
        // Files that changed meanwhile must not be found under the name of the old ones.
        if self.key != shared_key(&self.config, &self.checkpoint, options).unwrap_or_default() {
            return private(
                built,
                "files of the model were touched while they were read",
            );
        }
        if !builder.complete(&self.key)? {
            return private(built, "the weights did not fit the memory planned for them");
        }
        // Whoever maps weights to write them keeps them from being sealed.
        drop(built);
        let total = self.file_bytes;
        let sealed = builder
            .into_memory()
            .ok_or_else(|| std::io::Error::other("nothing was packed"))
            .and_then(|memory| memory.seal(|| beat(total, total)))
            .and_then(|pages| Segment::read(pages, &self.key));
        let segment = match sealed {
            Ok(segment) => segment,
            Err(error) => return Ok((self.pack(options)?, Sharing::Private(error.to_string()))),
        };
        let (segment, published) = lock.publish(segment);
        let sharing = match published {
            Ok(()) => Sharing::Packed,
            Err(error) => Sharing::Private(error.to_string()),
        };
        Ok((self.map(options, segment)?, sharing))
    }

    /// Takes weights that are there.
    fn map(&self, options: &LoadOptions<'_>, segment: Arc<Segment>) -> Result<Weights, ModelError> {
        let packing = packing(options, &self.checkpoint);
        let builder = Builder::ready(&self.checkpoint, packing, segment);
        self.build(&builder, options)
    }

    fn build(
        &self,
        builder: &Builder<'_>,
        options: &LoadOptions<'_>,
    ) -> Result<Weights, ModelError> {
        let model = Decoder::build(&self.config, builder, options.threads, options.mtp)?;
        let warning = builder.spare_head_warning()?;
        self.checkpoint.check_unchanged()?;
        Ok(Weights {
            model,
            hash: builder.weights_hash()?,
            warning,
        })
    }

    /// Bytes for packed weights: pieces begin on lines of the cache.
    fn room(&self) -> usize {
        (self.weight_bytes as usize).saturating_add(64 * self.checkpoint.tensors())
    }
}

/// What a rank reads of a model's tensors: all but the experts of others; and the bytes of them.
fn own_share(
    mut specs: TensorSpecs,
    checkpoint: &Checkpoint,
    spread: &Spread,
) -> (TensorSpecs, u64) {
    specs.tensors.retain(|spec| spread.reads(&spec.name));
    (specs, checkpoint.bytes_where(|name| spread.reads(name)))
}

/// Name of the packed weights, and what becomes of the wish to share them.
fn claim_shared(
    dir: &Path,
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions<'_>,
) -> (String, Option<Claim>) {
    match shared_key(config, checkpoint, options) {
        Some(key) => {
            let claim = sharing::claim(dir, &key, Patience::default(), options.progress);
            (key, Some(claim))
        }
        None => {
            let reason = "times of the model's files cannot be had".to_owned();
            (String::new(), Some(Claim::Private(reason)))
        }
    }
}

/// [`sharing::key`] with all options that packed bytes depend on.
fn shared_key(
    config: &ModelConfig,
    checkpoint: &Checkpoint,
    options: &LoadOptions<'_>,
) -> Option<String> {
    let rest = format!(
        "{:?} {} {MODEL_REVISION}",
        packing(options, checkpoint),
        options.mtp
    );
    sharing::key(config, checkpoint, &rest)
}

fn check_options(options: &LoadOptions<'_>) -> Result<Isa, ModelError> {
    let in_range = |field, value: usize, most: usize| {
        if (1..=most).contains(&value) {
            return Ok(());
        }
        Err(ModelError::Option {
            field,
            value: value.to_string(),
            allowed: format!("1 to {most}"),
        })
    };
    in_range("threads", options.threads, *THREADS.end() as usize)?;
    in_range("block-size", options.block_size, 4096)?;
    in_range(
        "max-num-batched-tokens",
        options.max_num_batched_tokens,
        1 << 20,
    )?;
    in_range("max-num-seqs", options.max_num_seqs, 1 << 16)?;
    if let KvMemory::Share(part) = options.kv
        && !(part > 0.0 && part <= 1.0)
    {
        return Err(ModelError::Option {
            field: "share of memory for KV",
            value: part.to_string(),
            allowed: "above 0, at most 1".to_owned(),
        });
    }
    Isa::detect(options.isa.as_deref()).map_err(|_| ModelError::Option {
        field: "isa",
        value: format!("{:?}", options.isa.as_deref().unwrap_or_default()),
        allowed: Isa::available()
            .into_iter()
            .map(Isa::name)
            .collect::<Vec<_>>()
            .join(", "),
    })
}

/// KV of the layers and, if it is loaded, of the MTP layer behind them.
fn kv_shape(config: &ModelConfig, options: &LoadOptions<'_>) -> KvShape {
    let mut shape = KvShape::of(config, options.dtype, options.block_size);
    shape.layers += usize::from(options.mtp);
    shape
}

/// The largest step that the engine may ask for.
fn step_size(config: &ModelConfig, options: &LoadOptions<'_>) -> StepSize {
    let (tokens, seqs) = (options.max_num_batched_tokens, options.max_num_seqs);
    let drafts = if options.mtp { options.max_drafts } else { 0 };
    StepSize {
        tokens,
        seqs,
        logits: max_logits_rows(tokens, seqs, drafts, config.vocab_size),
        drafting: options.mtp,
        threads: options.threads,
    }
}

/// What becomes of plain weights. In a checkpoint with int8 layers the others were left alone on
/// purpose.
fn packing(options: &LoadOptions<'_>, checkpoint: &Checkpoint) -> Packing {
    Packing {
        float: match options.dtype {
            Dtype::Bf16 => Compute::Bf16,
            Dtype::F32 => Compute::F32,
        },
        quantize: options.quantize && !checkpoint.has_int8(),
    }
}

/// Weights are hashed over all bytes of all tensors that are used, so that files which differ in one
/// bit of one expert differ here, and the same tensors in other shards do not.
fn fingerprint(
    config: &ModelConfig,
    weights: String,
    quantization: String,
    options: &LoadOptions<'_>,
) -> Fingerprint {
    let hash = |text: &str| format!("{:032x}", xxh3_128(text.as_bytes()));
    let mut identity = config.identity();
    for frequency in config.rope.frequencies(config.rope_dim()) {
        identity.push_str(&format!(" {:08x}", frequency.to_bits()));
    }
    let mut fingerprint = Fingerprint {
        id: String::new(),
        config: hash(&identity),
        weights,
        tokenizer: options.tokenizer_hash.clone(),
        quantization,
        kv_dtype: match options.dtype {
            Dtype::Bf16 => "bf16".to_owned(),
            Dtype::F32 => "f32".to_owned(),
        },
        block_size: options.block_size as u32,
        kv_layout: KV_LAYOUT,
        numerics: format!("{}-m{MODEL_REVISION}-exact", numerics_class()),
        mtp: options.mtp,
    };
    fingerprint.id = hash(&format!("{fingerprint:?}"));
    fingerprint
}

impl From<KernelError> for ModelError {
    fn from(error: KernelError) -> Self {
        Self::Kernel(error)
    }
}
