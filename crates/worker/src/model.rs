//! From a model directory to a [`Model`].

use crate::room::{BodyPlan, answer_bytes};
use crate::{LoadProgress, Model, SamplingDefaults, ServeError};
use std::path::PathBuf;
use std::sync::Arc;
use twinfer_config::ranges::THREADS;
use twinfer_config::{FlagError, Quantization, ServeConfig};
use twinfer_engine::eplb::EplbOptions;
use twinfer_engine::exchange::RankLink;
use twinfer_engine::placement::check_spread;
use twinfer_engine::{
    CheckedModel, KvMemory, LoadOptions, ModelError, ModelOutline, Sharing, default_share_dir,
    hub_revision, model_texts,
};
use twinfer_text::{ChatTemplate, TemplateState, Tokenizer};

/// Part of the available memory that KV gets unless `kv-cache-memory` says how much.
const KV_SHARE: f64 = 0.25;

/// Reads a model directory or GGUF file as `config` says. Everything that can be checked is checked before the
/// weights are read.
///
/// # Errors
/// [`ServeError::Model`] or [`ServeError::Flag`], naming file or flag, value and what is allowed.
pub fn load_model(
    config: &ServeConfig,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<Model, ServeError> {
    load(config, None, progress)
}

/// Tokenizer, template and defaults of a model: all that an instance needs beside its ranks.
pub(crate) struct Texts {
    pub(crate) tokenizer: Tokenizer,
    pub(crate) template: ChatTemplate,
    pub(crate) defaults: SamplingDefaults,
}

/// [`load_model`] without the weights.
pub(crate) fn load_texts(config: &ServeConfig) -> Result<Texts, ServeError> {
    let refused = |e: ModelError| ServeError::Model(e.to_string());
    let text = |e: twinfer_text::TextError| ServeError::Model(e.to_string());
    let texts = model_texts(&path(config)?).map_err(refused)?;
    let tokenizer = Tokenizer::of(&texts).map_err(text)?;
    let template = ChatTemplate::of(&texts, &tokenizer).map_err(text)?;
    let defaults = SamplingDefaults::of(&texts).map_err(ServeError::Model)?;
    drop(texts);
    // Reading a vocabulary takes several times what is left of it.
    twinfer_sys::return_freed_memory();
    Ok(Texts {
        tokenizer,
        template,
        defaults,
    })
}

/// Says what is missing for chats.
pub(crate) fn warn_of_template(template: &ChatTemplate) {
    match template.state() {
        TemplateState::Ready => {}
        TemplateState::Missing => {
            tracing::warn!("the model has no chat template: chats are refused")
        }
        TemplateState::Broken(reason) => {
            tracing::warn!(%reason, "the chat template is broken: chats are refused")
        }
    }
}

/// [`load_model`] as one of the ranks behind `link`, whose start-up test has passed: it reads its share of the experts,
/// and KV gets its share of the memory.
pub(crate) fn load(
    config: &ServeConfig,
    link: Option<&Arc<RankLink>>,
    progress: &(dyn Fn(LoadProgress) + Sync),
) -> Result<Model, ServeError> {
    let told = |done, total| progress(LoadProgress { done, total });
    let mut options = options(config)?;
    if let Some(link) = link {
        options.ranks = Some(Arc::clone(link));
        // Answers are the front's.
        options.beside = 0;
        if let KvMemory::Share(share) = &mut options.kv {
            *share /= f64::from(link.ranks());
        }
    }
    options.progress = Some(&told);
    let refused = |e: ModelError| ServeError::Model(e.to_string());
    let path = path(config)?;
    let checked = twinfer_engine::check(&path, &options).map_err(refused)?;
    let Texts {
        tokenizer,
        template,
        defaults,
    } = load_texts(config)?;
    if link.is_none() {
        warn_of_template(&template);
    }
    let warn = |warnings: &[String]| {
        for warning in warnings {
            tracing::warn!(%warning, "model");
        }
    };
    warn(&checked.warnings);
    let known = checked.warnings.len();
    told(0, checked.file_bytes);
    tracing::info!(
        weight_bytes = checked.weight_bytes,
        shared_bytes = checked.shared_bytes,
        kv_bytes = checked.kv_bytes,
        kv_blocks = checked.num_blocks,
        workspace_bytes = checked.workspace_bytes,
        loading_bytes = checked.loading_bytes,
        available_bytes = checked.available_bytes,
        max_model_len = checked.max_len,
        isa = %checked.isa,
        "model checked"
    );
    fits(config, &checked)?;
    if let Some(link) = link {
        together(link, &checked)?;
    }
    options.tokenizer_hash = tokenizer.content_hash().to_owned();
    let loaded = checked.load(&options).map_err(refused)?;
    // What only the values of the weights show.
    warn(loaded.warnings.get(known..).unwrap_or_default());
    match &loaded.sharing {
        Sharing::Off => {}
        Sharing::Packed => tracing::info!("weights packed in shared memory"),
        Sharing::Mapped => tracing::info!("weights mapped that another instance packed"),
        Sharing::Private(reason) => {
            tracing::warn!(%reason, "weights are not shared, but this process's own")
        }
    }
    Ok(Model {
        executor: Box::new(loaded.executor),
        tokenizer: Arc::new(tokenizer),
        template,
        fingerprint: loaded.fingerprint,
        num_blocks: loaded.num_blocks,
        max_model_len: u32::try_from(loaded.max_model_len).unwrap_or(u32::MAX),
        defaults,
    })
}

/// What the ranks of a node need together must be there: each alone has counted all of it for itself.
fn together(link: &RankLink, checked: &CheckedModel) -> Result<(), ServeError> {
    let (needed, available) = link
        .add_up_memory(checked.needed_bytes(), checked.available_bytes)
        .map_err(|error| ServeError::Model(format!("ranks: {error}")))?;
    if needed <= available {
        return Ok(());
    }
    Err(ServeError::Model(format!(
        "the ranks of a node need {needed} bytes of memory together, {available} are available; each needs up to {} for \
         weights, {} for workspace and {} for KV: lower kv-cache-memory, max-num-batched-tokens or dp",
        checked.weight_bytes, checked.workspace_bytes, checked.kv_bytes
    )))
}

/// The length that was asked for must fit the KV: a request of that length would be refused otherwise.
fn fits(config: &ServeConfig, checked: &CheckedModel) -> Result<(), ServeError> {
    let room = checked.max_len;
    match config.max_model_len {
        Some(length) if length as usize > room => {
            let allowed = format!(
                "KV of {} bytes ({} blocks) holds {room} tokens: allow more memory or at most that length",
                checked.kv_bytes, checked.num_blocks
            );
            Err(FlagError::new("max-model-len", length.to_string(), allowed).into())
        }
        _ => Ok(()),
    }
}

/// The part of [`load_model`]'s checks that needs the model's config only: lengths, drafts, instruction set, and
/// memory for KV, which holds at least one block.
///
/// # Errors
/// [`ServeError::Flag`] for a flag that does not fit the model or this machine, and, as `model`, for a config that
/// is not served; [`ServeError::Model`] for a model whose config cannot be read.
pub fn check_model_config(config: &ServeConfig) -> Result<(), ServeError> {
    /// Less is a mistake whatever the model.
    const PAGE: u64 = 4096;
    let options = options(config)?;
    let outline = path(config).map(|path| twinfer_engine::outline(&path, &options));
    let (least, why) = match &outline {
        Ok(Ok(outline)) => (outline.kv.block_bytes(), "one block of this model's KV"),
        _ => (PAGE, "one page"),
    };
    if let (KvMemory::Bytes(bytes), Some(text)) = (options.kv, &config.kv_cache_memory)
        && bytes < least
    {
        let allowed = format!("at least {least} bytes are needed, {why}");
        return Err(FlagError::new("kv-cache-memory", format!("{text:?}"), allowed).into());
    }
    match outline? {
        Ok(outline) => spreads(config, &outline),
        Err(ModelError::Option {
            field,
            value,
            allowed,
        }) => Err(FlagError::new(field, value, format!("allowed: {allowed}")).into()),
        Err(ModelError::Config { path, source }) => {
            Err(FlagError::new("model", path.display(), source.to_string()).into())
        }
        Err(error) => Err(ServeError::Model(error.to_string())),
    }
}

/// Can the model's experts be spread over the ranks as `config` says?
fn spreads(config: &ServeConfig, outline: &ModelOutline) -> Result<(), ServeError> {
    let redundant = config.num_redundant_experts.unwrap_or(0);
    let given = [
        (
            "moe-comm",
            config.moe_comm.map(|comm| comm.as_str().to_owned()),
        ),
        ("eplb-interval", config.eplb_interval.map(|n| n.to_string())),
        (
            "eplb-after-prefill",
            config.eplb_after_prefill.then(|| "true".to_owned()),
        ),
        (
            "num-redundant-experts",
            config.num_redundant_experts.map(|n| n.to_string()),
        ),
    ];
    let (Some(moe), 2..) = (&outline.config.moe, config.dp) else {
        let given = given
            .into_iter()
            .find_map(|(flag, value)| Some((flag, value?)));
        return match given {
            Some((flag, value)) if outline.config.moe.is_none() => {
                let allowed = "the model has no experts: leave it out";
                Err(FlagError::new(flag, value, allowed).into())
            }
            _ => Ok(()),
        };
    };
    let experts = u32::try_from(moe.experts).unwrap_or(u32::MAX);
    check_spread(experts, redundant, config.dp).map_err(|error| {
        let (flag, value) = match redundant {
            0 => ("dp", config.dp),
            _ => ("num-redundant-experts", redundant),
        };
        FlagError::new(flag, value, error.message).into()
    })
}

/// The directory or file that is served.
fn path(config: &ServeConfig) -> Result<PathBuf, ServeError> {
    match &config.model_revision {
        None => Ok(config.model.clone()),
        Some(revision) => hub_revision(&config.model, revision)
            .map_err(|error| ServeError::Model(error.to_string())),
    }
}

/// What `config` means to the loader.
///
/// # Errors
/// [`ServeError::Flag`] names the flag.
fn options(config: &ServeConfig) -> Result<LoadOptions<'static>, ServeError> {
    let cpus = crate::settings::cpus(config)?;
    let system = |source| ServeError::System {
        what: "find out which cores are permitted",
        source,
    };
    let threads = match (config.threads, &cpus) {
        (Some(threads), _) => threads as usize,
        (None, Some(cpus)) => cpus.len(),
        (None, None) => twinfer_sys::available_cpus().map_err(system)?.len(),
    };
    let kv = match &config.kv_cache_memory {
        Some(text) => KvMemory::Bytes(crate::settings::kv_bytes(text)?),
        None => KvMemory::Share(KV_SHARE),
    };
    Ok(LoadOptions {
        dtype: config.dtype,
        quantize: config.quantization == Quantization::W8a8,
        threads: threads.clamp(1, *THREADS.end() as usize),
        cpus,
        isa: config.isa.clone(),
        block_size: config.block_size as usize,
        kv,
        max_model_len: config.max_model_len.map(|length| length as usize),
        max_num_batched_tokens: config.max_num_batched_tokens as usize,
        max_num_seqs: config.max_num_seqs as usize,
        mtp: config.num_speculative_tokens > 0,
        share: config.share_weights.then(default_share_dir),
        max_drafts: config.num_speculative_tokens as usize,
        beside: answer_bytes().saturating_add(BodyPlan::new(config.max_body_bytes).bytes),
        moe_comm: config.moe_comm.unwrap_or_default(),
        eplb: EplbOptions {
            interval: config.eplb_interval.unwrap_or(0).into(),
            after_prefill: config.eplb_after_prefill,
            redundant: config.num_redundant_experts.unwrap_or(0),
            forced: false,
        },
        ..LoadOptions::default()
    })
}
