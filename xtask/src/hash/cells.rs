//! What the matrices consist of.

use std::path::PathBuf;
use twinfer_it::{demo_model, repository};

/// The same prompts through several cells, for each of several models; within a model all hashes are
/// equal.
pub(super) struct Matrix {
    pub(super) name: &'static str,
    pub(super) models: fn() -> Vec<Model>,
    pub(super) prompts: u64,
    pub(super) longest: u64,
    /// Tokens generated for each.
    pub(super) output: u32,
    pub(super) local: &'static [Local],
    pub(super) together: &'static [Together],
    pub(super) served: &'static [Served],
}

/// A model and how it is loaded.
pub(super) struct Model {
    pub(super) name: &'static str,
    pub(super) path: PathBuf,
    /// Made int8 at load.
    pub(super) quantize: bool,
    /// Has a layer that proposes tokens.
    pub(super) drafts: bool,
    /// Ids from 6 up to this are used in prompts.
    pub(super) ids: u64,
}

/// A cell that runs in this process.
pub(super) struct Local {
    pub(super) name: &'static str,
    pub(super) threads: usize,
    pub(super) sequences: u32,
    pub(super) chunk: u32,
    /// Blocks of the pool; few of them force preemption.
    pub(super) blocks: u32,
    pub(super) cache: Cache,
    /// Tokens proposed per step.
    pub(super) drafts: u32,
}

/// A cell whose ranks are processes without HTTP.
pub(super) struct Together {
    pub(super) name: &'static str,
    /// Ranks of each node.
    pub(super) counts: &'static [u32],
    pub(super) drafts: u32,
}

/// Prefix cache of a cell.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Cache {
    Off,
    /// On, prompts run once.
    Cold,
    /// On, prompts run twice and the second answers count.
    Hot,
}

/// A cell of real processes.
pub(super) struct Served {
    pub(super) name: &'static str,
    /// None: one colocated instance without router.
    pub(super) prefill: usize,
    pub(super) decode: usize,
    pub(super) drafts: u32,
}

const ALONE: Local = Local {
    name: "alone, prompt whole, 1 thread",
    threads: 1,
    sequences: 1,
    chunk: 1024,
    blocks: 2048,
    cache: Cache::Off,
    drafts: 0,
};

/// Few enough blocks for 32 sequences to be preempted; cells with these or fewer must see it.
pub(super) const TIGHT: u32 = 90;

const COLOCATED: Served = Served {
    name: "colocated, HTTP",
    prefill: 0,
    decode: 0,
    drafts: 0,
};

const PAIR: Served = Served {
    name: "1 prefill, 1 decode",
    prefill: 1,
    decode: 1,
    drafts: 0,
};

pub(super) const MATRICES: &[Matrix] = &[SLICE, ENGINE, RANKS];

const SLICE: Matrix = Matrix {
    name: "slice",
    models: || vec![demo()],
    prompts: 200,
    longest: 600,
    output: 40,
    local: &[
        ALONE,
        Local {
            name: "alone, prompt whole, 2 threads",
            threads: 2,
            ..ALONE
        },
        Local {
            name: "alone, chunks of 8, 1 thread",
            chunk: 8,
            ..ALONE
        },
        Local {
            name: "alone, chunks of 64, 2 threads",
            threads: 2,
            chunk: 64,
            ..ALONE
        },
        Local {
            name: "batch of 8, prompt whole, 1 thread",
            sequences: 8,
            ..ALONE
        },
        Local {
            name: "batch of 32, prompt whole, 2 threads",
            threads: 2,
            sequences: 32,
            ..ALONE
        },
        Local {
            name: "batch of 32, chunks of 64, 1 thread",
            sequences: 32,
            chunk: 64,
            ..ALONE
        },
        Local {
            name: "batch of 16, chunks of 8, 2 threads",
            threads: 2,
            sequences: 16,
            chunk: 8,
            ..ALONE
        },
        Local {
            name: "batch of 32, preempted, 1 thread",
            sequences: 32,
            chunk: 256,
            blocks: TIGHT,
            ..ALONE
        },
    ],
    together: &[],
    served: &[
        COLOCATED,
        PAIR,
        Served {
            name: "2 prefill, 2 decode",
            prefill: 2,
            decode: 2,
            drafts: 0,
        },
    ],
};

const ENGINE: Matrix = Matrix {
    name: "engine",
    models: || {
        let golden = |path: &str| repository().join("testdata/golden").join(path);
        vec![
            demo(),
            Model {
                name: "demo, W8A8 made at load",
                quantize: true,
                ..demo()
            },
            Model {
                name: "qwen3_moe",
                path: golden("qwen3_moe"),
                quantize: false,
                drafts: false,
                ids: 500,
            },
            Model {
                name: "qwen3_moe, W8A8 of compressed-tensors",
                path: golden("w8a8/qwen3_moe_compressed"),
                quantize: false,
                drafts: false,
                ids: 500,
            },
            Model {
                name: "deepseek_v3, W8A8 of ModelSlim",
                path: golden("w8a8/deepseek_v3_modelslim"),
                quantize: false,
                drafts: true,
                ids: 500,
            },
        ]
    },
    prompts: 1000,
    longest: 160,
    output: 40,
    local: &[
        ALONE,
        Local {
            name: "batch of 32, prompt whole, 2 threads, cache cold",
            threads: 2,
            sequences: 32,
            cache: Cache::Cold,
            ..ALONE
        },
        Local {
            name: "batch of 16, chunks of 8, 1 thread, cache hot",
            sequences: 16,
            chunk: 8,
            cache: Cache::Hot,
            ..ALONE
        },
        Local {
            name: "batch of 32, chunks of 64, 2 threads, preempted",
            threads: 2,
            sequences: 32,
            chunk: 64,
            blocks: TIGHT,
            ..ALONE
        },
        Local {
            name: "alone, 1 draft, 2 threads",
            threads: 2,
            drafts: 1,
            ..ALONE
        },
        Local {
            name: "batch of 16, 3 drafts, chunks of 64, cache hot",
            threads: 2,
            sequences: 16,
            chunk: 64,
            cache: Cache::Hot,
            drafts: 3,
            ..ALONE
        },
        Local {
            name: "batch of 32, 5 drafts, preempted, cache cold",
            threads: 2,
            sequences: 32,
            chunk: 256,
            blocks: TIGHT / 2,
            cache: Cache::Cold,
            drafts: 5,
        },
    ],
    together: &[],
    served: &[
        COLOCATED,
        PAIR,
        Served {
            name: "1 prefill, 1 decode, 1 draft",
            drafts: 1,
            ..PAIR
        },
    ],
};

const fn together(name: &'static str, counts: &'static [u32], drafts: u32) -> Together {
    Together {
        name,
        counts,
        drafts,
    }
}

const RANKS: Matrix = Matrix {
    name: "ranks",
    models: || {
        let mut models = (ENGINE.models)();
        models.extend((ENGINE.models)().into_iter().nth(2).map(|model| Model {
            name: "qwen3_moe, W8A8 made at load",
            quantize: true,
            ..model
        }));
        models
    },
    prompts: 50,
    longest: 200,
    output: 24,
    local: &[ALONE],
    together: &[
        together("1 rank", &[1], 0),
        together("2 ranks", &[2], 0),
        together("4 ranks", &[4], 0),
        together("8 ranks", &[8], 0),
        together("16 ranks", &[16], 0),
        together("2 nodes of 1 rank", &[1, 1], 0),
        together("2 nodes of 4 ranks", &[4, 4], 0),
        together("2 ranks, 1 draft", &[2], 1),
        together("4 ranks, 3 drafts", &[4], 3),
        together("2 nodes of 2 ranks, 2 drafts", &[2, 2], 2),
    ],
    served: &[],
};

fn demo() -> Model {
    Model {
        name: "demo",
        path: demo_model(),
        quantize: false,
        drafts: true,
        ids: 1500,
    }
}
