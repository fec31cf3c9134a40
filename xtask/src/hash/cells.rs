//! What the matrices consist of.

use std::path::PathBuf;
use twinfer_config::MoeComm;
use twinfer_engine::eplb::EplbOptions;
use twinfer_engine::phase::PhasePolicy;
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

/// A cell of several ranks without HTTP.
pub(super) struct Together {
    pub(super) name: &'static str,
    /// Ranks of each node.
    pub(super) counts: &'static [u32],
    /// Ranks of a node meet in memory; else over TCP, as those of different nodes do.
    pub(super) share_memory: bool,
    pub(super) run: Run,
    /// Of each rank.
    pub(super) sequences: u32,
    pub(super) chunk: u32,
    pub(super) policy: PhasePolicy,
    /// Tokens proposed per step.
    pub(super) drafts: u32,
    /// How rows come to the experts of other ranks.
    pub(super) comm: MoeComm,
    /// How experts change their seats.
    pub(super) eplb: EplbOptions,
}

/// What the ranks of a cell are.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Run {
    /// Of this process.
    Threads,
    /// Of this program.
    Processes,
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

/// Ranks as threads that share memory.
const RANK: Together = Together {
    name: "1 rank",
    counts: &[1],
    share_memory: true,
    run: Run::Threads,
    sequences: 16,
    chunk: 128,
    policy: PhasePolicy::DEFAULT,
    drafts: 0,
    comm: MoeComm::AllToAll,
    eplb: NO_MOVES,
};

const NO_MOVES: EplbOptions = EplbOptions {
    interval: 0,
    after_prefill: false,
    redundant: 0,
    forced: false,
};

/// Every third step all seats change, whatever the loads are.
const SWAPS: EplbOptions = EplbOptions {
    interval: 3,
    forced: true,
    ..NO_MOVES
};

const RANKS: Matrix = Matrix {
    name: "ranks",
    models: || {
        let golden = |path: &str| repository().join("testdata/golden").join(path);
        let quantized = |name, model| Model {
            name,
            quantize: true,
            ..model
        };
        let qwen = || Model {
            name: "qwen3_moe, bf16",
            path: golden("qwen3_moe"),
            quantize: false,
            drafts: false,
            ids: 500,
        };
        vec![
            demo(),
            quantized("demo, W8A8 made at load", demo()),
            qwen(),
            quantized("qwen3_moe, W8A8 made at load", qwen()),
            Model {
                name: "qwen3_moe, W8A8 of compressed-tensors",
                path: golden("w8a8/qwen3_moe_compressed"),
                ..qwen()
            },
        ]
    },
    prompts: 60,
    longest: 200,
    output: 24,
    local: &[ALONE],
    together: &[
        RANK,
        Together {
            name: "2 ranks",
            counts: &[2],
            ..RANK
        },
        Together {
            name: "4 ranks",
            counts: &[4],
            ..RANK
        },
        Together {
            name: "8 ranks",
            counts: &[8],
            ..RANK
        },
        Together {
            name: "16 ranks",
            counts: &[16],
            ..RANK
        },
        Together {
            name: "4 ranks over TCP, phases apart, prompts in pieces of 24",
            counts: &[4],
            share_memory: false,
            chunk: 24,
            policy: PhasePolicy {
                prefill_run: 1,
                ..PhasePolicy::AT_ONCE
            },
            ..RANK
        },
        Together {
            name: "4 ranks, prompts at once, padded",
            counts: &[4],
            policy: PhasePolicy::AT_ONCE,
            ..RANK
        },
        Together {
            name: "2 nodes of 1 rank",
            counts: &[1, 1],
            ..RANK
        },
        Together {
            name: "2 nodes of 4 ranks",
            counts: &[4, 4],
            ..RANK
        },
        Together {
            name: "2 nodes of 8 ranks",
            counts: &[8, 8],
            ..RANK
        },
        Together {
            name: "4 ranks as processes",
            counts: &[4],
            run: Run::Processes,
            ..RANK
        },
        Together {
            name: "16 ranks as processes",
            counts: &[16],
            run: Run::Processes,
            ..RANK
        },
        Together {
            name: "2 nodes of 2 ranks as processes",
            counts: &[2, 2],
            run: Run::Processes,
            ..RANK
        },
        Together {
            name: "4 ranks, all rows to all",
            counts: &[4],
            comm: MoeComm::AllGather,
            ..RANK
        },
        Together {
            name: "2 nodes of 4 ranks, all rows to all",
            counts: &[4, 4],
            comm: MoeComm::AllGather,
            ..RANK
        },
        Together {
            name: "16 ranks, all rows to all, prompts at once, padded",
            counts: &[16],
            comm: MoeComm::AllGather,
            policy: PhasePolicy::AT_ONCE,
            ..RANK
        },
        Together {
            name: "4 ranks, experts balanced after 8 steps and after prompts",
            counts: &[4],
            eplb: EplbOptions {
                interval: 8,
                after_prefill: true,
                redundant: 4,
                ..NO_MOVES
            },
            ..RANK
        },
        Together {
            name: "4 ranks, experts swapped",
            counts: &[4],
            eplb: SWAPS,
            ..RANK
        },
        Together {
            name: "16 ranks, 16 experts twice, swapped",
            counts: &[16],
            eplb: EplbOptions {
                redundant: 16,
                ..SWAPS
            },
            ..RANK
        },
        Together {
            name: "2 nodes of 2 ranks as processes, 4 experts twice, swapped, all rows to all",
            counts: &[2, 2],
            run: Run::Processes,
            comm: MoeComm::AllGather,
            eplb: EplbOptions {
                redundant: 4,
                ..SWAPS
            },
            ..RANK
        },
        Together {
            name: "4 ranks, experts swapped, all rows to all, 2 drafts",
            counts: &[4],
            drafts: 2,
            comm: MoeComm::AllGather,
            eplb: SWAPS,
            ..RANK
        },
        Together {
            name: "2 ranks, 1 draft",
            counts: &[2],
            drafts: 1,
            ..RANK
        },
        Together {
            name: "16 ranks, 3 drafts",
            counts: &[16],
            drafts: 3,
            ..RANK
        },
        Together {
            name: "2 nodes of 4 ranks, 2 drafts",
            counts: &[4, 4],
            drafts: 2,
            ..RANK
        },
        Together {
            name: "2 nodes of 2 ranks as processes, 5 drafts",
            counts: &[2, 2],
            run: Run::Processes,
            drafts: 5,
            ..RANK
        },
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
